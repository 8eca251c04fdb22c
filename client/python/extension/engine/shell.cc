#include "client/python/extension/engine/shell.h"

#include <algorithm>
#include <optional>

#include "client/python/extension/engine/engine.h"
#include "client/python/extension/errors.h"
#include "client/python/extension/unit.h"

namespace shardd::python {
namespace {

// For a call that may wait, from autograd's threads or from Python's.
class MayWait {
 public:
  MayWait() {
    if (PyGILState_Check() != 0) {
      no_gil_.emplace();
    }
  }

 private:
  const Waiting waiting_;
  std::optional<NoGil> no_gil_;
};

}  // namespace

void EngineShell::Add(Unit& unit) {
  for (const int group : unit.groups()) {
    units_.resize(std::max(units_.size(), static_cast<size_t>(group) + 1));
    units_[static_cast<size_t>(group)] = &unit;
  }
}

void EngineShell::Remove(const Unit& unit) {
  for (const int group : unit.groups()) {
    if (static_cast<size_t>(group) < units_.size()) {  // else it was never added
      units_[static_cast<size_t>(group)] = nullptr;
    }
  }
}

Status EngineShell::Unshard(int32_t group, shardd_phase phase) {
  return engine_.job().group(group).UnshardAsync(phase);
}

Status EngineShell::WaitUnshard(int32_t group) {
  ParameterGroup handle = engine_.job().group(group);
  std::optional<MayWait> may_wait;
  if (!engine_.settled()) {
    may_wait.emplace();
  }
  return handle.Wait();
}

Status EngineShell::Reshard(int32_t group) { return engine_.job().group(group).Reshard(); }

Status EngineShell::WaitGradientSlot(int32_t group) {
  const MayWait may_wait;
  return engine_.job().group(group).WaitGradientSlot();
}

Status EngineShell::SubmitGradients(int32_t group, const uint8_t* present, const uint8_t* fresh) {
  ParameterGroup handle = engine_.job().group(group);
  Unit& unit = *units_[static_cast<size_t>(group)];
  unit.BeforeSubmit(group);
  {
    const MayWait may_wait;  // a stream may have to be waited for
    Status status = handle.SubmitGradients(present, fresh);
    if (!status.ok()) {
      return status;
    }
  }
  unit.AfterSubmit(group);
  return Status();
}

}  // namespace shardd::python
