// Memory of gradients that a step has used, and that nobody shows or holds, goes back to the system.

#include <vector>

#include "client/python/extension/engine/engine.h"
#include "client/python/extension/errors.h"
#include "client/python/extension/unit.h"

namespace shardd::python {

void Unit::AddUnseenGradients(std::vector<int>* params) const {
  for (const auto& param : params_) {
    if (param->trainable && !param->pending && param->shared_shard()->GradientIsUnseen()) {
      params->push_back(param->daemon_param);
    }
  }
}

void Engine::GiveGradientsBack() {
  if (!gives_back_ || !gradients_used_) {
    return;
  }
  std::vector<int> params;
  for (const Unit* unit : units_) {
    unit->AddUnseenGradients(&params);
  }
  gradients_used_ = params.empty();  // all are shown still: perhaps not in the next forward
  const NoGil no_gil;
  for (const int param : params) {
    const Status status = job().GiveBackGradient(param);
    if (!status.ok() && status.code() == Code::kFailedPrecondition) {
      return;  // the job was given gradients for the next step already: by an extension, by the program
    }
    Check(status);
  }
}

}  // namespace shardd::python
