// Full parameters and gradients, as stored: entered by all ranks together. values.h copies them out and writes them
// back.

#include <torch/csrc/autograd/graph_task.h>

#include "client/python/extension/engine/engine.h"
#include "client/python/extension/errors.h"
#include "client/python/extension/unit.h"

namespace shardd::python {

bool Engine::in_forward_backward() const {
  return iteration_.in_forward() || torch::autograd::get_current_graph_task_id() != -1;
}

void Engine::EnterFullParams(const Job::FullParams& options, bool of_shards) {
  used_gradients_.MarkWanted();  // some may be written
  CheckOutsideFullParams("enter full parameters");
  CheckBetweenPasses("enter full parameters");
  CloseStep(*this);
  ReshardAll();
  if (passes_.used()) {
    CommitWriting();  // some rank may have one open
  }
  if (of_shards) {
    attached().WaitForCommit();
  } else {
    const NoGil no_gil;
    Check(job().EnterFullParams(options));
  }
  full_params_ = true;
  of_shards_ = of_shards;
  for (Unit* unit : units_) {
    unit->gradients().HideOwn();
  }
}

void Engine::LeaveFullParams() {
  full_params_ = false;
  for (Unit* unit : units_) {
    unit->gradients().ShowOwn();
  }
  if (of_shards_) return;
  const NoGil no_gil;
  Check(job().LeaveFullParams());
}

void Engine::CheckOutsideFullParams(const char* what) const {
  if (full_params_) {
    Check(Status(Code::kFailedPrecondition, std::string(what) +
                                                ": full parameters are summoned; leave the summon_full_params context "
                                                "first"));
  }
}

}  // namespace shardd::python
