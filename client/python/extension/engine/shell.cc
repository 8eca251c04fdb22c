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
  for (const int group : unit.life().groups()) {
    units_.resize(std::max(units_.size(), static_cast<size_t>(group) + 1));
    units_[static_cast<size_t>(group)] = &unit;
  }
}

void EngineShell::Remove(const Unit& unit) {
  for (const int group : unit.life().groups()) {
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
  if (!engine_.attached().settled()) {
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
  unit.gradients().BeforeSubmit(group);
  {
    const MayWait may_wait;  // a stream may have to be waited for
    Status status = handle.SubmitGradients(present, fresh);
    if (!status.ok()) {
      return status;
    }
  }
  unit.gradients().AfterSubmit(group);
  return Status();
}

bool EngineShell::InsidePass() { return engine_.job().inside_pass(); }

Status EngineShell::EnterPass(bool stepped, const std::string& state) {
  const auto enter = [this](bool commits, const std::string& rank_state) {
    const NoGil no_gil;
    return engine_.job().EnterPass(commits, rank_state);
  };
  Status status = enter(stepped, state);
  if (!status.ok() && engine_.FollowInPass()) {
    status = enter(/*commits=*/false, "");
  }
  if (status.ok() && engine_.passes().copies()) {
    engine_.attached().AwaitPassCopies();
    if (engine_.passes().in_step()) {
      const NoGil no_gil;
      status = shardd::AwaitStore(engine_.job());
    }
  }
  return status;
}

Status EngineShell::LeavePass() {
  const NoGil no_gil;  // a stream may have to be waited for
  return engine_.job().LeavePass();
}

Status EngineShell::StopReading() { return engine_.job().StopReading(); }

Status EngineShell::ResumeReading() { return engine_.job().ResumeReading(); }

Status EngineShell::ReshardAll() {
  engine_.ReshardAll();
  return Status();
}

void EngineShell::StepCommitted() { engine_.StepCommitted(); }

}  // namespace shardd::python
