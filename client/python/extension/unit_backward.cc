// A unit in backward: its parameters unsharded again, and the end.

#include <utility>

#include "client/python/extension/errors.h"
#include "client/python/extension/unit.h"

namespace shardd::python {

void Unit::CheckInGraph(uint64_t generation) const {
  if (engine_ == nullptr) {
    Check(Status(Code::kFailedPrecondition, "backward of a fully sharded module: the module is gone"));
  }
  if (generation != 0 && generation != engine_->iteration().generation()) {
    Check(Status(Code::kFailedPrecondition,
                 "backward of a fully sharded module: its forward was run before the job was attached again; run the "
                 "step from its beginning"));
  }
}

void Unit::PreBackward(uint64_t generation) {
  const py::gil_scoped_acquire gil;
  CheckInGraph(generation);
  const bool begins = life_.ReachBackward();
  engine_->QueueFinal(/*whole=*/true);
  if (begins) {
    shown_.CheckKept();
    life_.BeginBackward();
    Unshard();
  }
}

void Unit::BackwardReachedInputs(uint64_t generation) {
  {
    const py::gil_scoped_acquire gil;
    CheckInGraph(generation);
    engine_->QueueFinal(/*whole=*/false);
  }
  PostBackward();
}

void Unit::BeginHiddenBackward() {
  const py::gil_scoped_acquire gil;
  CheckInGraph(/*generation=*/0);
  if (!engine_->iteration().in_backward()) {
    PreBackward(/*generation=*/0);
  }
}

void Unit::PostBackward() {
  const py::gil_scoped_acquire gil;
  Check(life_.EndBackward());
  graph_kept_ = graph_kept_ || engine_->iteration().makes_graph();
  if (reshard_after_backward && !graph_kept_) {
    ToSharded();
  }
}

void Unit::EndGraph() {
  if (std::exchange(graph_kept_, false) && reshard_after_backward) {
    ToSharded();
  }
}

void Unit::EndBackward(bool whole) {
  if (whole || life_.training() == fsdp::Training::kPostBackward) {
    gradients_.EndBackward();
    life_.CloseBackward(whole, /*stays_unsharded=*/shown_.unsharded());
  }
}

void Unit::AbandonBackward() {
  graph_kept_ = false;
  life_.AbandonBackward();
  gradients_.AbandonBackward();
  life_.CloseBackward(/*whole=*/true, /*stays_unsharded=*/shown_.unsharded());
}

}  // namespace shardd::python
