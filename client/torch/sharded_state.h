#ifndef SHARDD_CLIENT_TORCH_SHARDED_STATE_H_
#define SHARDD_CLIENT_TORCH_SHARDED_STATE_H_

// The adaptor's state machine, below the public face (adaptor.h) and the autograd nodes (autograd_nodes.h).
//
// One forward of one fully sharded module is a Use. In a pass with gradients it goes through:
//   BeginForward   unshard (FORWARD; in a backward, which recomputes, BACKWARD); inputs pass through a node that will
//                  run after the module's backward
//   EndForward     reshard, unless the group stays unsharded or recomputes; outputs get a hook that runs before the
//                  module's backward
//   BeginBackward  (hook) unshard (BACKWARD); ask for the group whose backward comes next
//   OnGradient     (each parameter's gradient accumulator) one copy into the rank's gradient slot
//   EndBackward    (node) submit, reshard, unless the backward makes a graph, which reads the parameters again
// and BackwardDone() does what is left: groups whose inputs need no gradient have no node, and the root has no end
// before the end of backward. What of it is a parameter group's own, whatever the framework, is in client/fsdp.
//
//   sharded_state.cc            forward and backward: who holds which group unsharded
//   sharded_state_gradients.cc  gradients into slots, the end of a backward
//   sharded_state_attach.cc     the module and its job: parameters, first values, a new attachment, the end

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/cpp/shardd.h"
#include "client/fsdp/group_lives.h"
#include "client/fsdp/iteration.h"
#include "client/torch/parameter_storage.h"
#include "client/torch/status_error.h"
#include "client/torch/torch_versions.h"

namespace shardd {

namespace internal {

class ShardedState;

// One forward of one group. Lives as long as the graph of that forward.
struct Use {
  Use(std::shared_ptr<ShardedState> owner, int32_t group);
  ~Use();
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

  const std::weak_ptr<ShardedState> state;
  const int32_t group;
  const uint64_t generation;  // of the state's iteration when it was made; a graph of another is dead
  size_t order = 0;           // position among the forwards of the pass
  bool awaits_end = false;    // an EndBackward is still to come
  // Valid while hold_stamp is the group's: ReshardAll drops every hold at once by changing the group's.
  uint64_t hold_stamp = 0;
  bool holds = false;        // its unshard has no reshard yet
  bool recomputes = false;   // it was made in a backward, which follows at once
  bool in_backward = false;  // between BeginBackward and EndBackward
};

struct ParamState {
  std::string fqn;
  int32_t group = 0;
  int32_t index_in_group = 0;
  bool requires_grad = false;
  at::ScalarType stored_dtype = at::kFloat;
  at::ScalarType unsharded_dtype = at::kFloat;
  std::vector<at::Tensor> tensors;            // the module's, one per distinct tensor object
  std::vector<NodePtr> accumulators;          // of each; torch holds them weakly
  std::unique_ptr<ParameterStorage> storage;  // null until adopted
  at::Tensor gradient;  // over the gradient slot, in unsharded dtype; undefined for a frozen parameter
};

struct GroupState {
  std::string name;
  std::vector<int32_t> params;
  std::vector<int32_t> also_unshards;
  bool reshard_after_forward = true;
  bool trainable = false;
  int readers = 0;  // waited-for holds, of this group and of groups that use its tied parameters
  uint64_t hold_stamp = 1;
  int awaiting_end = 0;  // uses whose EndBackward is still to come
};

// The job, as it is.
class JobShell final : public fsdp::Shell {
 public:
  explicit JobShell(Job* job) : job_(job) {}
  Status Unshard(int32_t group, shardd_phase phase) override { return job_->group(group).UnshardAsync(phase); }
  Status WaitUnshard(int32_t group) override { return job_->group(group).Wait(); }
  Status Reshard(int32_t group) override { return job_->group(group).Reshard(); }
  Status WaitGradientSlot(int32_t group) override { return job_->group(group).WaitGradientSlot(); }
  // Gradients add up until a step: none is fresh.
  Status SubmitGradients(int32_t group, const uint8_t* present, const uint8_t*) override {
    return job_->group(group).SubmitGradients(present);
  }

 private:
  Job* const job_;
};

// Thread-compatible; the autograd engine runs CPU backward on the thread that called it. Held by a shared_ptr, so that
// graphs that outlive the ShardedModule find an end instead of freed memory.
class ShardedState : public std::enable_shared_from_this<ShardedState> {
 public:
  struct Options {
    bool prefetch_on_begin = true;  // BackwardPrefetch::kPre
    bool prefetch_on_end = false;   // BackwardPrefetch::kPost
    bool float8_gathers = false;    // MixedPrecision's
  };
  ShardedState(std::unique_ptr<Job> job, const Options& options)
      : job_(std::move(job)), shell_(job_.get()), options_(options), lives_(shell_, *job_) {}

  // Finds the module's parameters, given as (name, tensor) pairs, in the plan. Unmanaged ones are left alone.
  Status Bind(const std::vector<std::pair<std::string, at::Tensor>>& tensors);
  // Before version 1: rank `writer` gives the tensors' values, every rank commits. Afterwards a no-op. A death
  // meanwhile starts it over.
  Status GiveInitialValues(int32_t writer);
  // Moves the tensors into storages of their own. Afterwards every use outside forward and backward raises.
  void Adopt();

  // These throw StatusError.
  std::shared_ptr<Use> BeginForward(int32_t group);
  void EndForward(const std::shared_ptr<Use>& use, bool has_backward);
  void AbandonForward(Use* use);  // a forward that threw: as if it had not been
  void BeginBackward(Use* use);
  void EndBackward(Use* use);
  void OnGradient(int32_t param, const at::Tensor& gradient);

  Status BackwardDone(bool last);
  // Gives back every group, whoever holds it.
  Status ReshardAll();
  Status Reattach();
  // User code gave its forward or backward up: nothing is held, graphs are dead.
  Status AbandonBackward();
  // The job is over: what remains of the module raises, graphs are dead.
  std::unique_ptr<Job> TakeJob();

  Job* job() { return job_.get(); }
  uint64_t generation() const { return iteration_.generation(); }
  // Uses of the group whose EndBackward is still to come.
  int& AwaitingEnd(int32_t group) { return group_at(group).awaiting_end; }
  const std::vector<ParamState>& params() const { return params_; }
  const Options& options() const { return options_; }

 private:
  friend struct Use;
  GroupState& group_at(int32_t group) { return groups_[static_cast<size_t>(group)]; }
  Status CheckAlive(const Use& use) const;
  // One unshard, waited for, for `use`.
  Status Acquire(Use* use, shardd_phase phase);
  Status Release(Use* use);
  Status AddReader(int32_t group);
  void DropReader(int32_t group);
  // Asks ahead for the group whose backward comes after that of forward number `order`.
  Status PrefetchBefore(size_t order);
  void LoadGradientSlots();
  void ForgetMemory();

  std::unique_ptr<Job> job_;  // null once taken
  JobShell shell_;
  const Options options_;
  std::vector<GroupState> groups_;
  std::vector<ParamState> params_;         // by index in the plan
  fsdp::GroupLives lives_;                 // of groups_
  std::vector<std::weak_ptr<Use>> order_;  // uses of this pass, in order of their forwards
  fsdp::Iteration iteration_;
};

}  // namespace internal
}  // namespace shardd

#endif  // SHARDD_CLIENT_TORCH_SHARDED_STATE_H_
