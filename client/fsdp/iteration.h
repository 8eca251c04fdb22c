#ifndef SHARDD_CLIENT_FSDP_ITERATION_H_
#define SHARDD_CLIENT_FSDP_ITERATION_H_

#include <cstdint>
#include <utility>

namespace shardd::fsdp {

// Where this rank is between the beginning of a forward and the end of its backward, and which graphs are alive. Units
// are compared by address and never read. Thread-compatible, as a shardd_job.
class Iteration {
 public:
  // The unit that runs first is the root of this forward, until EndForward with it. REQUIRES: no forward is under way.
  void BeginForward(const void* unit) { forward_root_ = unit; }
  bool in_forward() const { return forward_root_ != nullptr; }
  bool IsForwardRoot(const void* unit) const { return forward_root_ == unit; }
  // False: it is not the root of the forward that is under way.
  bool EndForward(const void* unit) {
    return forward_root_ == unit && std::exchange(forward_root_, nullptr) != nullptr;
  }

  // A unit's backward begins. True: it is the first, so the end of the backward is to be queued. `whole`: a
  // forward's output was reached, which makes it the backward of all; else a unit's inputs were. `makes_graph`: it was
  // asked for its own graph, through which a later one may go.
  bool BeginBackward(bool whole, bool makes_graph = false) {
    partial_ = !whole && (partial_ || !in_backward_);
    makes_graph_ = in_backward_ ? makes_graph_ : makes_graph;
    return !std::exchange(in_backward_, true);
  }
  bool makes_graph() const { return makes_graph_; }  // the backward that is under way, or was last
  bool in_backward() const { return in_backward_; }
  // Ends the forward, too. True: only a part of the model was in it: of a list of modules some ran by themselves. The
  // forward of the whole model, if there was one, keeps its own backward.
  bool EndBackward() {
    forward_root_ = nullptr;
    in_backward_ = false;
    return std::exchange(partial_, false);
  }

  // Graphs carry the generation that they were made in; one of another is dead.
  uint64_t generation() const { return generation_; }
  void EndGraphs() { ++generation_; }
  // The forward or backward was given up; what is left of its graph is dead.
  void Abandon() {
    (void)EndBackward();
    EndGraphs();
  }

 private:
  const void* forward_root_ = nullptr;
  bool in_backward_ = false;
  bool partial_ = false;
  bool makes_graph_ = false;
  uint64_t generation_ = 1;
};

}  // namespace shardd::fsdp

#endif  // SHARDD_CLIENT_FSDP_ITERATION_H_
