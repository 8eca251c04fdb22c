#ifndef SHARDD_CLIENT_PYTHON_EXTENSION_UNIT_H_
#define SHARDD_CLIENT_PYTHON_EXTENSION_UNIT_H_

// What one fully_shard() call made: the parameters that are unsharded and resharded together. The daemon knows them as
// one parameter group per module of the call. In a pass with gradients a unit goes through
//   PreForward    unshard; inputs pass through a node that runs after the unit's backward
//   PostForward   reshard, unless it stays unsharded; outputs get a hook that runs before the unit's backward
//   PreBackward   (hook) unshard
//   OnGradient    (each parameter's gradient accumulator) one copy into the rank's gradient slot
//   PostBackward  (node, or the engine's FinalCallback) submit, reshard
// with the states and exceptions of torch's FSDPState and FSDPParamGroup (recomputation, units used several times).

#include <ATen/ATen.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/python/extension/engine/engine.h"
#include "client/python/extension/managed_param.h"

namespace shardd::python {

// `check()` is called before each unit's forward without gradients; what it raises ends the forward.
void SetInferenceCheck(pybind11::object check);
// `move(args, kwargs, device)` returns what takes the place of a root's inputs, as a pair. Called on GPUs alone.
void SetMoveInputs(pybind11::object move);

enum class Training { kIdle, kForward, kPreBackward, kPostBackward };

class Unit : public std::enable_shared_from_this<Unit> {
 public:
  Unit() = default;
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;
  ~Unit();

  // Attributes of torch's FSDPParamGroup that FSDPModule's methods set, and what a policy says.
  bool reduce_grads = true;
  bool all_reduce_grads = true;
  bool hybrid = false;  // a 2-D mesh: gradients that are not all-reduced yet are not shown
  bool shows_gradients() const { return reduce_grads && (all_reduce_grads || !hybrid); }
  bool reshard_after_backward = true;
  bool unshard_in_backward = true;
  bool reduce_scatter_unused_params = false;
  // Where one parameter of the unit gets a gradient, the others get zero, as in PyTorch's flat parameters.
  bool completes_gradients = false;
  bool reshard_after_forward = true;
  // After its forward modules have the sharded parameters again, which the program knows, also where it stays
  // unsharded.
  bool shows_shards = false;
  double gradient_scale = 1;  // of gradients as they are written, beside the job's own factor
  bool cast_inputs = false;
  at::ScalarType param_dtype = at::kFloat;
  bool cast_outputs = false;
  at::ScalarType output_dtype = at::kFloat;

  // `lazy_init(False)` registers the root; called before the first use, and whenever the unit has no engine.
  // `lazy_init(True)`, inside a pass: the job's place is taken by one that trains what the program does.
  void SetLazyInit(pybind11::object lazy_init) { lazy_init_ = std::move(lazy_init); }
  // Registration: the engine, the daemon's groups, the parameters.
  void Bind(std::shared_ptr<Engine> engine, const std::vector<int>& groups);
  void AddParam(std::shared_ptr<ManagedParam> param, std::vector<Place> places);
  // A tied parameter of another unit, which modules of this one use too. Its group is one that this unit's unshard.
  void BorrowParam(const Unit& owner, int daemon_param, std::vector<Place> places);
  // The parameter added last as it is stored, for units that may compute in full precision: shown in its place then.
  // Its gradients go where the other's go.
  void AddStored(std::shared_ptr<ManagedParam> param);
  void set_full_precision(bool full_precision);
  // It reads what is stored. Units without parameters do not, and leave inputs as they are all the same.
  bool full_precision() const { return full_precision_ && !uses_.empty(); }
  // Of a unit that may be at full precision, and is not.
  bool reads_casts() const { return !stored_uses_.empty() && !full_precision_; }
  // Back to before registration, the shards' values copied out where the job still has them.
  void Unbind();
  // The sharded parameters get memory of their own, which may be written; LoadMemory of the engine ends that.
  void CopyShardsOut();
  bool bound() const { return engine_ != nullptr; }

  // From module hooks; the GIL is held. None: unchanged.
  pybind11::object PreForward(pybind11::handle args, pybind11::handle kwargs);
  pybind11::object PostForward(pybind11::handle output);
  // An exception ended the root's forward.
  void ForwardFailed() {
    if (engine_ != nullptr && engine_->alive()) {
      engine_->ForwardFailed(this);
    }
  }
  pybind11::object CastOutput(pybind11::handle output);
  // From autograd; without the GIL or with it. `generation`: of the forward, 0 where it does not matter. Raise where
  // the model is gone, or was attached again since: a collector takes it apart with the GIL, until the first of them
  // has begun the backward, which keeps it (Engine::QueueFinal).
  void PreBackward(uint64_t generation);
  void BackwardReachedInputs(uint64_t generation);
  void PostBackward();
  void OnGradient(size_t param, const at::Tensor& gradient);
  // Before it, where nothing has begun the unit's backward: the model's output hid its tensors (a generator, an object
  // of the program's).
  void BeginHiddenBackward();

  void Unshard();
  // `unshard(async_op=True)`: the daemon is asked, and modules keep the sharded parameters until Unshard.
  void RequestUnshard();
  void WaitForUnshard();  // what was asked for and not used since
  void Reshard();         // as the training state says
  void ReshardByHand();
  void ToSharded();  // whatever the state
  bool unsharded() const { return unsharded_; }
  // The pass is entered for it.
  bool in_use() const {
    return unsharded_ ||
           std::any_of(groups_.begin(), groups_.end(), [this](const Group& g) { return lives().holds(g.id) > 0; });
  }
  Training group_training() const { return group_training_; }
  uint64_t backward_number() const { return backward_number_; }  // of its last PostBackward, among those of all units
  const Engine* engine() const { return engine_.get(); }         // null: not bound
  std::shared_ptr<PyObject> KeepModel() const { return engine_ == nullptr ? nullptr : engine_->KeepModel(); }
  void set_idle();

  // What the program has done to sharded parameters (engine/changes.cc). Adds what is new to `changes`; raises where it
  // cannot be taken.
  struct Change {
    std::shared_ptr<HeldShard> shard;
    pybind11::object given;  // the parameter in its place; null: the same, in another storage
  };
  bool HasChanges() const;
  void FindChanges(std::vector<Change>* changes) const;
  // Where modules have `before`, they have `now`.
  void PutObject(pybind11::handle before, pybind11::handle now) const;

  // From the engine's shell: around the submission of what the group's slot holds.
  void BeforeSubmit(int group);
  void AfterSubmit(int group);

  // From the engine.
  uint64_t generation() const;
  void SubmitRest();  // what this backward still owes
  void EndBackward();
  void EndPartialBackward();  // only of the units that were in it
  bool HasUnfrozen() const;   // a parameter that the job does not train
  void CheckGradientsAreShown() const;
  bool HasPendingGradients() const;
  void ShowGradients();
  // What `.grad` says is what the job has. `stepping`: only of what the daemon's optimizer has, as its step takes it.
  void SettleGradients(bool stepping);
  // Adds the daemon's numbers of parameters whose gradients of earlier steps nobody shows or holds.
  void AddUnseenGradients(std::vector<int>* params) const;
  // This rank's own gradients (held_shard_own.cc) are `.grad` between backwards.
  void ShowOwnGradients();
  void HideOwnGradients();
  // `counts` (null: none): by the daemon's parameters, one more for each that was updated.
  // `in_trainers`: made by an optimizer of torch's, after which the job has the gradients still.
  void EndStep(float* counts, bool in_trainers);
  std::shared_ptr<ManagedParam> FindParam(int daemon_param) const;  // null: not here
  // The shard of which it is the first parameter.
  HeldShard* FindShard(int daemon_param) const;
  void AbandonBackward();  // after the engine has abandoned it with the job
  void LoadMemory();
  void ForgetMemory();
  void LoseMemory();  // see ManagedParam
  const std::vector<int>& groups() const { return group_ids_; }

 private:
  friend class Engine;
  struct Group {
    int id = 0;
    bool trainable = false;
    std::vector<size_t> params;  // indices into params_, by the daemon's index
  };
  struct Use {
    std::shared_ptr<ManagedParam> param;
    std::vector<Place> places;
  };
  void CheckInGraph(uint64_t generation) const;
  void AskDaemon(bool backward);
  fsdp::GroupLives& lives() { return engine_->groups(); }
  const fsdp::GroupLives& lives() const { return std::as_const(*engine_).groups(); }
  const Group& group_of(int id) const;
  bool ran_forward() const;                       // since the last whole backward was closed
  bool in_slot(const ManagedParam& param) const;  // this backward's gradient is there, not submitted
  const std::vector<Use>& uses() const { return full_precision_ ? stored_uses_ : uses_; }
  void RegisterParams(bool unsharded);
  // After forward, and before what computes with it again.
  void ShowShards();
  void HideShards();
  // AssertionError where the program has changed what modules compute with since forward.
  void CheckKept();
  // The same for sharded parameters.
  void CheckUnchanged() const;
  bool KeepsOwnGradient(const ManagedParam& param) const {
    return !reduce_grads && param.keeps_own_gradient(!reshard_after_backward);
  }
  // What backwards without synchronisation have left, of parameters without a gradient in this one.
  void SubmitOwnGradients();
  // Parameters of a flat parameter that has got a gradient in this backward, and they have not.
  void CompleteFlatGradients();
  void EndGroups();
  bool RegisterPreBackward(pybind11::handle output);

  pybind11::object lazy_init_;
  std::shared_ptr<Engine> engine_;
  std::vector<int> group_ids_;
  std::vector<Group> groups_;
  std::vector<std::shared_ptr<ManagedParam>> params_;
  std::vector<std::shared_ptr<HeldShard>> shards_;  // of params_
  std::vector<Use> uses_;                           // of params_, then borrowed ones
  std::vector<Use> stored_uses_;                    // the same as stored; empty: never in full precision
  bool full_precision_ = false;                     // what the modules are shown
  bool unsharded_ = false;
  bool requested_ = false;     // since the last Unshard
  bool shards_shown_ = false;  // it is unsharded, and modules have the sharded parameters
  Training state_training_ = Training::kIdle;
  Training group_training_ = Training::kIdle;
  uint64_t backward_number_ = 0;
};

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_EXTENSION_UNIT_H_
