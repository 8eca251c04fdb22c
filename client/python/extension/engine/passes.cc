// Passes, and what the program stores into its shards between them. It is handed in where the next pass begins, which
// ends the pass of a rank that is only paused. With copies for passes no store is in anybody's way: a pass reads what
// the daemon has copied where it began, and what is written is in the next one's.

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "client/python/extension/engine/engine.h"
#include "client/python/extension/errors.h"
#include "client/python/extension/unit.h"

namespace shardd::python {

void Engine::EnterPassByHand(bool backward) {
  if (passes_ && inside_pass_ && !backward) {
    const bool ended = !job().inside_pass();  // by edits, this rank's or another's
    EnterPass();
    pass_by_hand_ = pass_by_hand_ || ended;
  } else if (passes_ && !inside_pass_) {
    if (!backward) {
      TakeChanges();
    }
    EnterPass();
    pass_by_hand_ = true;
  }
}

void Engine::LeavePassByHand() {
  if (pass_by_hand_ && std::none_of(units_.begin(), units_.end(), [](const Unit* unit) { return unit->in_use(); })) {
    LeavePass();
  }
}

void Engine::WatchWrites() { Check(job().WatchWrites()); }

void Engine::UsePasses() {
  passes_ = true;
  copies_ = info().pass_copies != 0;
}

// Outside of a forward and backward. One that an exception ended is given up.
void Engine::CheckBetweenPasses(const char* what) {
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  if (forward_root_ != nullptr || (final_queued_ && in_backward)) {
    Check(Status(Code::kFailedPrecondition,
                 std::string(what) + ": a forward or backward is under way; write between a backward and the next "
                                     "forward"));
  }
  if (final_queued_) {
    ResetIteration();
  }
}

void Engine::OpenWindow() {
  WaitForWindow();
  TakeChanges();
  if (!copies_) {
    return;
  }
  if (pass_by_hand_) {
    LeavePass();  // what is unsharded is of before the store
  }
  written_ = paused_;
}

void Engine::WaitForWindow() {
  CheckBetweenPasses("open a write window");
  if (copies_) {
    (void)job();  // what is stored on this thread's stream is behind what another one has read or written
    return;
  }
  LeavePass();
  const NoGil no_gil;
  Check(job().OpenWindow());
}

void Engine::CloseWindow() {
  CheckBetweenPasses("commit what was written");
  LeavePass();
  TakeChanges();
  EnterPass();
  LeavePass();
}

void Engine::MarkStepped(std::string state) {
  stepped_ = true;
  stepped_state_ = std::move(state);
}

void Engine::MarkState(std::string state) { stepped_state_ = std::move(state); }

void Engine::EnterPass() {
  if (!passes_) {
    return;
  }
  if (inside_pass_) {
    if (job().inside_pass()) {
      const Status status = job().ResumePass();
      if (status.ok()) {
        paused_ = false;
        return;
      }
      if (job().inside_pass()) {
        Check(status);
      }
    }
    for (Unit* unit : units_) {
      unit->ToSharded();  // of a pass that another rank's edits have ended
    }
  }
  {
    const NoGil no_gil;
    Check(job().EnterPass(stepped_, stepped_state_));
  }
  if (copies_) {
    AwaitHostState();  // the host's stores are in no stream's order
  }
  inside_pass_ = true;
  paused_ = false;
  settled_ = settled_ && (!copies_ || device_.is_cpu());  // a stream may be behind the copies
  stepped_state_.clear();
  if (stepped_) {
    stepped_ = false;
    ++steps_;
    for (Unit* unit : units_) {
      unit->EndStep(nullptr, /*in_trainers=*/true);
    }
  }
}

void Engine::LeavePass() {
  if (!inside_pass_) {
    return;
  }
  for (Unit* unit : units_) {
    unit->ToSharded();
  }
  inside_pass_ = paused_ = pass_by_hand_ = written_ = false;
  if (job().inside_pass()) {
    const NoGil no_gil;  // a stream may have to be waited for
    Check(job().LeavePass());
  }
}

void Engine::EndPass() {
  const bool of_shards =
      copies_ && std::any_of(units_.begin(), units_.end(), [](const Unit* unit) { return unit->full_precision(); });
  LeavePass();
  if (of_shards) {
    EnterPass();
    LeavePass();
  }
}

void Engine::PausePass() {
  if (inside_pass_ && job().inside_pass()) {
    Check(job().PausePass());
    paused_ = true;
  }
}
}  // namespace shardd::python
