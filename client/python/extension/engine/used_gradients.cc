#include "client/python/extension/engine/used_gradients.h"

#include "client/python/extension/errors.h"
#include "client/python/extension/unit.h"

namespace shardd::python {

void UsedGradients::GiveBack(AttachedJob& attached, const std::vector<Unit*>& units) {
  if (!given_back_ || !used_) {
    return;
  }
  std::vector<int> params;
  for (const Unit* unit : units) {
    unit->gradients().AddUnseen(&params);
  }
  used_ = params.empty();  // all are shown still: perhaps not in the next forward
  const NoGil no_gil;
  for (const int param : params) {
    const Status status = attached.job().GiveBackGradient(param);
    if (!status.ok() && status.code() == Code::kFailedPrecondition) {
      return;  // the job was given gradients for the next step already: by an extension, by the program
    }
    Check(status);
  }
}

}  // namespace shardd::python
