#include "client/python/extension/engine/engine.h"

#include <algorithm>
#include <utility>

#include "client/python/extension/errors.h"
#include "client/python/extension/unit.h"

namespace shardd::python {

Engine::Engine(std::unique_ptr<AttachedJob> attached)
    : attached_(std::move(attached)), shell_(*this), groups_(shell_, attached_->unordered()), passes_(shell_) {}

Engine::~Engine() {
  // Waits for the daemon, at most some seconds.
  const py::gil_scoped_acquire gil;
  program_.Forget();
  const NoGil no_gil;
  attached_->Take().reset();
}

void Engine::AddUnit(Unit* unit) {
  units_.push_back(unit);
  shell_.Add(*unit);
}

void Engine::RemoveUnit(const Unit* unit) {
  units_.erase(std::remove(units_.begin(), units_.end(), unit), units_.end());
  (void)iteration_.EndForward(unit);
  shell_.Remove(*unit);
  for (const int group : unit->life().groups()) {
    groups_.Forget(group);
  }
}

std::shared_ptr<ManagedParam> Engine::FindManaged(int param) const {
  for (const Unit* unit : units_) {
    if (std::shared_ptr<ManagedParam> found = unit->gradients().FindParam(param); found != nullptr) {
      return found;
    }
  }
  return nullptr;
}

void Engine::LoadMemory() {
  for (Unit* unit : units_) {
    unit->gradients().LoadMemory();
  }
}

void Engine::ReshardAll() {
  for (Unit* unit : units_) {
    unit->ToSharded();
  }
}

AttachedJob::StepResult Engine::Step(shardd_step_options options, const std::string& state) {
  ReshardAll();
  const bool of_several = options.left_group_count > 0 || options.part != 0;
  for (Unit* unit : units_) {
    unit->gradients().Settle(of_several ? UnitGradients::For::kStepOfSeveral : UnitGradients::For::kStep);
  }
  options.state = state.data();
  options.state_bytes = state.size();
  bool sent = false;
  const auto asked = [&] {
    sent = true;
    open_step_.reset(options.part == 0 ? nullptr
                                       : new OpenStep{{options.groups, options.groups + options.group_count}, state});
  };
  const auto end = [&](bool skipped) {
    float* const counts = update_counts_.defined() && !skipped ? update_counts_.mutable_data_ptr<float>() : nullptr;
    const bool part = options.part != 0;
    ++steps_;
    passes_.Stepped();
    forward_since_step_ = part;  // what is not committed is lost with the epoch
    if (!part) {
      used_gradients_.MarkUsed();
    }
    for (Unit* unit : units_) {
      part ? unit->gradients().EndPart(counts, steps_) : unit->gradients().EndStep(counts, /*in_trainers=*/false);
    }
  };
  AttachedJob::StepResult result;
  try {
    result = attached_->Step(options, asked);
  } catch (...) {
    if (sent && options.part != 0) {
      end(/*skipped=*/options.loss_scale > 0);  // a signal's handler has raised: the part is made all the same
    }
    throw;
  }
  end(result.skipped);
  return result;
}

bool StepIsOpen(const Engine& engine) { return engine.open_step_ != nullptr; }

void CloseStep(Engine& engine) {
  if (!StepIsOpen(engine)) {
    return;
  }
  // One that was not asked for, as where a signal's handler raised, is by the next call.
  std::unique_ptr<OpenStep> asked;
  engine.open_step_->Close([&](const shardd_step_options& options) {
    (void)engine.attached_->Step(options, [&] { asked = std::move(engine.open_step_); });
  });
  engine.passes_.Stepped();
  ++engine.steps_;
  engine.forward_since_step_ = false;
  engine.used_gradients_.MarkUsed();
  for (Unit* unit : engine.units_) {
    unit->gradients().EndStep(nullptr, /*in_trainers=*/false);
  }
}

void Engine::StepCommitted() {
  ++steps_;
  used_gradients_.MarkUsed();
  for (Unit* unit : units_) {
    unit->gradients().EndStep(nullptr, /*in_trainers=*/true);
  }
}

void Engine::Reattach() {
  iteration_.Abandon();
  forward_since_step_ = false;
  open_step_.reset();
  passes_.Forget();
  full_params_ = false;
  MapAgain(/*keeps_gradients=*/false);
}

void Engine::MapAgain(bool keeps_gradients) {
  used_gradients_.MarkWanted();
  for (Unit* unit : units_) {
    unit->ForgetMemory(keeps_gradients);
  }
  attached_->Reattach();
  LoadMemory();
}

void Engine::FollowDaemon() {
  const shardd_job_info info = attached_->unordered().info();
  if (info.lost_nothing == 0 || forward_since_step_) {
    return;
  }
  iteration_.Abandon();
  passes_.Forget();
  MapAgain(/*keeps_gradients=*/true);
  CheckGoesOn(info);
}

bool Engine::FollowInPass() {
  const shardd_job_info info = attached_->unordered().info();
  if (info.lost_nothing == 0) {
    return false;
  }
  MapAgain(/*keeps_gradients=*/true);
  CheckGoesOn(info);
  program_.Followed();
  return true;
}

void Engine::CheckGoesOn(const shardd_job_info& before) const {
  const shardd_job_info next = attached_->unordered().info();
  if (next.committed_step != before.committed_step || next.version == 0) {
    Check(Status(Code::kDataLoss, "attach to the next daemon: it does not go on with the job (got step " +
                                      std::to_string(next.committed_step) + ", version " +
                                      std::to_string(next.version) + "; want step " +
                                      std::to_string(before.committed_step) + ")"));
  }
}

bool Engine::WantsExtension() const {
  return extension_asked_ ||
         std::any_of(units_.begin(), units_.end(), [](const Unit* unit) { return unit->gradients().HasUnfrozen(); });
}

bool Engine::Extend(const std::string& spec_json) {
  CloseStep(*this);
  ReshardAll();
  for (const Unit* unit : units_) {
    unit->gradients().CheckShown();
  }
  bool extended = false;
  {
    const NoGil no_gil;
    Check(job().Extend(spec_json, &extended));
  }
  extension_asked_ = false;
  return extended;
}

}  // namespace shardd::python
