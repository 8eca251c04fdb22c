// What happens once per forward and once per backward, and what an exception that ended one leaves.

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "client/python/extension/engine/engine.h"
#include "client/python/extension/errors.h"
#include "client/python/extension/unit.h"

namespace shardd::python {

bool Engine::RootPreForward(Unit* unit) {
  if (forward_root_ != nullptr && (forward_root_ == unit || IsRoot(unit))) {
    ResetIteration();  // an exception ended the forward before
  }
  if (forward_root_ != nullptr) {
    return false;
  }
  // What was written since the model's last forward counts in this one, as where it is gathered anew. Its parts may
  // run in any number in one pass.
  if (paused_ && (IsRoot(unit) || written_)) {
    LeavePass();
  }
  TakeChanges();
  forward_root_ = unit;
  pass_by_hand_ = false;
  EnterPass();
  GiveGradientsBack();
  return true;
}

py::object Engine::EndForward(const Unit* unit, py::object output, bool has_backward) {
  if (forward_root_ != unit) {
    return output;
  }
  forward_root_ = nullptr;
  if (!complete_partial_.is_none()) {
    output = complete_partial_(std::move(output));
  }
  // With gradients enabled there may be a backward all the same, of tensors that the output hides in an object of its
  // own.
  if (!ReadsShardsAlone() && (has_backward || (c10::GradMode::is_enabled() && AnyUnsharded()))) {
    PausePass();
  } else {
    EndPass();
  }
  return output;
}

bool Engine::ReadsShardsAlone() const {
  return copies_ &&
         std::any_of(units_.begin(), units_.end(), [](const Unit* unit) { return unit->full_precision(); }) &&
         std::none_of(units_.begin(), units_.end(), [](const Unit* unit) { return unit->reads_casts(); });
}

bool Engine::AnyUnsharded() const {
  return std::any_of(units_.begin(), units_.end(), [](const Unit* unit) { return unit->unsharded(); });
}

void Engine::QueueFinal() {
  if (final_queued_) {
    return;
  }
  if (paused_) {
    Check(job().ResumePass());  // units that stayed unsharded read the shards, too
    paused_ = false;
  }
  final_queued_ = true;
  gradients_used_ = false;
  for (Unit* unit : units_) {
    unit->HideOwnGradients();
  }
  // The model is kept to the end of the backward, also of one that fails.
  torch::autograd::Engine::get_default_engine().queue_callback(
      [weak = weak_from_this(), generation = generation_, kept = KeepModel()] {
        if (const std::shared_ptr<Engine> engine = weak.lock(); engine != nullptr) {
          engine->FinalCallback(generation);
        }
      });
}

void Engine::QueuePartialFinal() {
  if (!final_queued_) {
    partial_backward_ = true;
    QueueFinal();
  }
}

void Engine::EndUnits(bool partial) {
  const auto done = [this] {
    const NoGil no_gil;  // a stream may have to be waited for
    Check(job().BackwardDone(/*last=*/false));
  };
  if (partial) {
    done();
    for (Unit* unit : units_) {
      unit->EndPartialBackward();
    }
    return;
  }
  for (Unit* unit : units_) {
    if (unit->group_training() != Training::kPostBackward) {
      unit->PostBackward();  // its inputs required no gradient
    }
    unit->set_idle();
  }
  for (Unit* unit : units_) {
    unit->SubmitRest();
  }
  done();
  for (Unit* unit : units_) {
    unit->EndBackward();
  }
}

void Engine::FinalCallback(uint64_t generation) {
  const py::gil_scoped_acquire gil;
  if (generation != generation_) {
    return;
  }
  final_queued_ = false;
  forward_root_ = nullptr;
  const bool partial = std::exchange(partial_backward_, false);
  EndUnits(partial);
  if (!complete_partial_.is_none()) {
    complete_partial_(py::ellipsis());
  }
  const bool show =
      std::any_of(units_.begin(), units_.end(), [](const Unit* unit) { return unit->HasPendingGradients(); });
  if (show) {
    {
      const NoGil no_gil;
      Check(job().WaitGradients());
    }
    AwaitHostState();
  }
  if (partial) {
    PausePass();
  } else if (AnyUnsharded()) {  // set_reshard_after_backward(False)
    for (Unit* unit : units_) {
      unit->ShowShards();
    }
    PausePass();
    pass_by_hand_ = true;
  } else {
    EndPass();
  }
  if (show) {
    // Hooks on gradients run in the order of the units' backward, as with PyTorch.
    std::vector<Unit*> units = units_;
    std::stable_sort(units.begin(), units.end(),
                     [](const Unit* a, const Unit* b) { return a->backward_number() < b->backward_number(); });
    for (Unit* unit : units) {
      unit->ShowGradients();
    }
  }
  for (Unit* unit : units_) {
    unit->ShowOwnGradients();
  }
}

void Engine::ResetIteration() {
  forward_root_ = nullptr;
  final_queued_ = partial_backward_ = false;
  ++generation_;  // what is left of its graph is dead
  for (Unit* unit : units_) {
    unit->set_idle();
    unit->ToSharded();
  }
  Check(job().AbandonBackward());
  for (Unit* unit : units_) {
    unit->AbandonBackward();
  }
  // The pass stays entered: other ranks may be in it, and wait for this one to do its backward again.
  // Where all ranks have failed they begin again together, so that nothing of the first try is left. Else the others
  // wait for this rank's backward, and its next forward is part of their pass.
  PausePass();
}

void Engine::ForwardFailed(const Unit* unit) {
  if (forward_root_ != unit) {
    return;
  }
  try {
    ResetIteration();
  } catch (...) {
    // The forward's own exception is what the program gets; the next use says this again.
  }
}

}  // namespace shardd::python
