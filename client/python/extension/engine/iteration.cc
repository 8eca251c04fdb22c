// What happens once per forward and once per backward, and what an exception that ended one leaves.

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "client/python/extension/engine/engine.h"
#include "client/python/extension/errors.h"
#include "client/python/extension/unit.h"

namespace shardd::python {
namespace {

// Waits for what all ranks' backwards, of which this one's is closed, have added up. False: nothing of it is to be
// shown.
bool AwaitGradients(Engine& engine, bool partial) {
  const auto some = [&engine](bool (UnitGradients::*has)() const) {
    return std::any_of(engine.units().begin(), engine.units().end(),
                       [has](const Unit* unit) { return (unit->gradients().*has)(); });
  };
  // A rank that has given nothing waits where the program has asked for the gradients of all parameters; not where it
  // wants some alone (torch.autograd.grad), which others need not do with it.
  const auto* const wanted = torch::autograd::get_current_graph_task_exec_info();
  const bool of_all = !partial && wanted != nullptr && wanted->empty();
  if (!some(&UnitGradients::HasPending) && !(of_all && some(&UnitGradients::MayLack))) {
    return false;
  }
  Job& job = engine.job();
  std::vector<int32_t> given;
  {
    const NoGil no_gil;
    Check(job.WaitGradients());
    Check(GivenByOthers(job, &given));
  }
  engine.attached().AwaitHostState();
  for (Unit* unit : engine.units()) {
    if (!given.empty()) {
      unit->gradients().TakeFromOthers(given);
    }
  }
  return some(&UnitGradients::HasPending);
}

}  // namespace

bool Engine::RootPreForward(Unit* unit) {
  if (iteration_.in_forward() && (iteration_.IsForwardRoot(unit) || IsRoot(unit))) {
    ResetIteration();  // an exception ended the forward before
  }
  if (iteration_.in_forward()) {
    return false;
  }
  CloseStep(*this);
  FollowDaemon();
  forward_since_step_ = forward_since_step_ || c10::GradMode::is_enabled();
  Check(passes_.LeaveBefore(/*whole=*/IsRoot(unit)));
  TakeChanges();
  iteration_.BeginForward(unit);
  Check(passes_.EnterForward());
  used_gradients_.GiveBack(*attached_, units_);
  return true;
}

py::object Engine::EndForward(const Unit* unit, py::object output, bool has_backward) {
  if (!iteration_.EndForward(unit)) {
    return output;
  }
  output = program_.CompleteForward(std::move(output));
  const auto full_precision = [](const Unit* u) { return u->shown().reads_stored(); };
  const bool reads_shards = std::any_of(units_.begin(), units_.end(), full_precision);
  // Where the whole model is evaluated at full precision it reads the shards and not their copies, so no rank may
  // store into them before all have read, whether a backward follows or not. Where only some units are, the reduced
  // gradients, which a step waits for, come after every rank's forward.
  const bool reads_shards_alone =
      passes_.copies() && reads_shards &&
      std::none_of(units_.begin(), units_.end(), [](const Unit* u) { return u->shown().reads_casts(); });
  // With gradients enabled there may be a backward all the same, of tensors that the output hides in an object of its
  // own.
  if (!reads_shards_alone && (has_backward || (c10::GradMode::is_enabled() && AnyUnsharded()))) {
    Check(passes_.StopReading());
  } else {
    Check(passes_.End(reads_shards));
  }
  return output;
}

bool Engine::AnyUnsharded() const {
  return std::any_of(units_.begin(), units_.end(), [](const Unit* unit) { return unit->shown().unsharded(); });
}

void Engine::QueueFinal(bool whole) {
  if (!iteration_.in_backward()) {
    CloseStep(*this);  // of a graph that was kept, or whose forward was before the step
    Check(passes_.ResumeReading());
  }
  if (!iteration_.BeginBackward(whole, /*makes_graph=*/c10::GradMode::is_enabled())) {
    return;
  }
  used_gradients_.MarkWanted();
  for (Unit* unit : units_) {
    unit->gradients().HideOwn();
    unit->gradients().SayDropped();
    if (unit->graph_kept()) {
      unit->Unshard();
    }
  }
  // The model is kept to the end of the backward, also of one that fails.
  torch::autograd::Engine::get_default_engine().queue_callback(
      [weak = weak_from_this(), generation = iteration_.generation(), kept = program_.KeepModel()] {
        if (const std::shared_ptr<Engine> engine = weak.lock(); engine != nullptr) {
          engine->FinalCallback(generation);
        }
      });
}

void Engine::EndUnits(bool partial) {
  const auto done = [this] {
    for (Unit* unit : units_) {
      unit->gradients().LeaveToOthers();
    }
    const NoGil no_gil;  // a stream may have to be waited for
    Check(job().BackwardDone(/*last=*/false));
  };
  if (partial) {
    done();
    for (Unit* unit : units_) {
      unit->EndBackward(/*whole=*/false);
    }
    return;
  }
  for (Unit* unit : units_) {
    if (!iteration_.makes_graph()) {
      unit->EndGraph();
    }
    if (unit->life().training() != fsdp::Training::kPostBackward) {
      unit->PostBackward();  // its inputs required no gradient
    }
    unit->life().SetIdle();
  }
  for (Unit* unit : units_) {
    unit->gradients().SubmitRest();
  }
  done();
  for (Unit* unit : units_) {
    unit->EndBackward(/*whole=*/true);
  }
}

void Engine::FinalCallback(uint64_t generation) {
  const py::gil_scoped_acquire gil;
  if (generation != iteration_.generation()) {
    return;
  }
  const bool partial = iteration_.EndBackward();
  EndUnits(partial);
  program_.CompleteBackward();
  const bool show = AwaitGradients(*this, partial);
  if (partial) {
    Check(passes_.StopReading());
  } else if (AnyUnsharded()) {  // set_reshard_after_backward(False), create_graph
    for (Unit* unit : units_) {
      if (unit->shows_shards || unit->graph_kept()) {
        unit->shown().ShowShards();
      }
    }
    Check(passes_.StopReadingByHand());
  } else {
    Check(passes_.End(
        std::any_of(units_.begin(), units_.end(), [](const Unit* u) { return u->shown().reads_stored(); })));
  }
  // Hooks on gradients may have collectives of their own, so their order is the same on all ranks, whatever units each
  // has run, and in whatever order: the last unit's first, as the backward of a model that runs them in turn.
  for (auto unit = units_.rbegin(); unit != units_.rend(); ++unit) {
    if ((*unit)->replaces_reduction) {
      (*unit)->gradients().Replace();
    } else if (show) {
      (*unit)->gradients().Show();
    }
  }
  for (Unit* unit : units_) {
    unit->gradients().ShowOwn();
  }
}

void Engine::ResetIteration() {
  iteration_.Abandon();
  for (Unit* unit : units_) {
    unit->life().SetIdle();
    unit->ToSharded();
  }
  Check(job().AbandonBackward());
  for (Unit* unit : units_) {
    unit->AbandonBackward();
  }
  // The pass stays entered: other ranks may be in it, and wait for this one to do its backward again.
  // Where all ranks have failed they begin again together, so that nothing of the first try is left. Else the others
  // wait for this rank's backward, and its next forward is part of their pass.
  Check(passes_.StopReading());
}

void Engine::ForwardFailed(const Unit* unit) {
  if (!iteration_.IsForwardRoot(unit)) {
    return;
  }
  try {
    ResetIteration();
  } catch (...) {
    // The forward's own exception is what the program gets; the next use says this again.
  }
}

}  // namespace shardd::python
