// What the program stores into its shards between passes.

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "client/python/extension/engine/engine.h"
#include "client/python/extension/errors.h"
#include "client/python/extension/unit.h"

namespace shardd::python {

void Engine::EnterPassByHand(bool backward) {
  CloseStep(*this);
  if (!backward && passes_.used() && !passes_.inside()) {
    TakeChanges();
  }
  Check(passes_.EnterByHand(backward));
}

void Engine::LeavePassByHand() {
  if (passes_.by_hand() &&
      std::none_of(units_.begin(), units_.end(), [](const Unit* unit) { return unit->in_use(); })) {
    Check(passes_.Leave());
  }
}

// Outside of a forward and backward. One that an exception ended is given up.
void Engine::CheckBetweenPasses(const char* what) {
  const bool in_graph = torch::autograd::get_current_graph_task_id() != -1;
  if (iteration_.in_forward() || (iteration_.in_backward() && in_graph)) {
    Check(Status(Code::kFailedPrecondition,
                 std::string(what) + ": a forward or backward is under way; write between a backward and the next "
                                     "forward"));
  }
  if (iteration_.in_backward()) {
    ResetIteration();
  }
}

void Engine::BeginWriting() {
  CloseStep(*this);
  LeaveToWrite();
  TakeChanges();
  Check(passes_.BeginWriting());
  AwaitStore(*this);
}

void AwaitStore(Engine& engine) {
  if (engine.passes().copies()) {
    const NoGil no_gil;
    Check(shardd::AwaitStore(engine.job()));
  }
}

void Engine::LeaveToWrite() {
  CheckBetweenPasses("write parameters");
  if (passes_.copies()) {
    (void)job();  // what is stored on this thread's stream is behind what another one has read or written
    return;
  }
  Check(passes_.Leave());
}

void Engine::CommitWriting() {
  CheckBetweenPasses("commit what was written");
  CloseStep(*this);
  Check(passes_.Leave());
  TakeChanges();
  Check(passes_.Commit());
}

}  // namespace shardd::python
