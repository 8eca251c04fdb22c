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
// Where it is in that is fsdp::UnitLife's, what modules show ShownParams', and what becomes of gradients
// UnitGradients'; this is where module hooks and autograd call in.

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "client/fsdp/unit_life.h"
#include "client/python/extension/engine/engine.h"
#include "client/python/extension/managed_param.h"
#include "client/python/extension/shown_params.h"
#include "client/python/extension/unit_gradients.h"
#include "client/python/extension/unit_options.h"

namespace shardd::python {

// `check()` is called before each unit's forward without gradients; what it raises ends the forward.
void SetInferenceCheck(pybind11::object check);
// `move(args, kwargs, device)` returns what takes the place of a root's inputs, as a pair. Called on GPUs alone.
void SetMoveInputs(pybind11::object move);

class Unit : public UnitOptions, public std::enable_shared_from_this<Unit> {
 public:
  Unit() = default;
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;
  ~Unit();

  // `lazy_init(False)` registers the root; called before the first use, and whenever the unit has no engine.
  // `lazy_init(True)`, inside a pass: the job's place is taken by one that trains what the program does.
  void SetLazyInit(pybind11::object lazy_init) { lazy_init_ = std::move(lazy_init); }
  // Registration: the engine, the daemon's groups, the parameters.
  void Bind(std::shared_ptr<Engine> engine, const std::vector<int>& groups);
  void AddParam(std::shared_ptr<ManagedParam> param, std::vector<Place> places);
  // The parameter added last as it is stored (see ShownParams). Its gradients go where the other's go.
  void AddStored(std::shared_ptr<ManagedParam> param);
  // `extension(True)` gathers, as they say themselves, parameters that are tensor subclasses with fsdp_pre_all_gather,
  // once the daemon has unsharded the unit; `extension(False)` frees what that took, when it is resharded.
  void SetExtension(pybind11::object extension) { extension_ = std::move(extension); }
  // What one of those is unsharded, from the first gather on. REQUIRES: sharded.
  void SetUnsharded(int daemon_param, pybind11::object unsharded);
  // Back to before registration, the shards' values copied out where the job still has them.
  void Unbind();
  bool bound() const { return engine_ != nullptr; }
  const Engine* engine() const { return engine_.get(); }  // null: not bound
  std::shared_ptr<PyObject> KeepModel() const { return bound() ? engine_->KeepModel() : nullptr; }

  fsdp::UnitLife& life() { return life_; }
  const fsdp::UnitLife& life() const { return life_; }
  UnitGradients& gradients() { return gradients_; }
  const UnitGradients& gradients() const { return gradients_; }
  ShownParams& shown() { return shown_; }
  const ShownParams& shown() const { return shown_; }
  void set_full_precision(bool full_precision);

  // From module hooks; the GIL is held. None: unchanged.
  pybind11::object PreForward(pybind11::handle args, pybind11::handle kwargs);
  pybind11::object PostForward(pybind11::handle output);
  // An exception ended the root's forward.
  void ForwardFailed() {
    if (bound() && engine_->alive()) {
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
  // Before a gradient, where nothing has begun the unit's backward: the model's output hid its tensors (a generator, an
  // object of the program's).
  void BeginHiddenBackward();

  void Unshard();
  // `unshard(async_op=True)`: the daemon is asked, and modules keep the sharded parameters until Unshard.
  void RequestUnshard();
  void WaitForUnshard();  // what was asked for and not used since
  void Reshard();         // as the training state says
  void ReshardByHand();
  void ToSharded();  // whatever the state
  // The pass is entered for it.
  bool in_use() const { return shown_.unsharded() || life_.held(); }

  // From the engine.
  void EndBackward(bool whole);  // of all units
  // A backward with create_graph has gone through the unit. A later one may go through the graph that it has made, in
  // any order, so the unit stays unsharded, or is unsharded where that one begins, and is resharded where it ends.
  bool graph_kept() const { return graph_kept_; }
  void EndGraph();
  void AbandonBackward();  // after the engine has abandoned it with the job
  void ForgetMemory(bool keeps_gradients);

 private:
  void CheckInGraph(uint64_t generation) const;
  void AskDaemon(bool backward);
  void GatherExtension();
  bool RegisterPreBackward(pybind11::handle output);

  pybind11::object lazy_init_;
  pybind11::object extension_;  // null: every parameter is shown as the job has it
  std::shared_ptr<Engine> engine_;
  fsdp::UnitLife life_;
  UnitGradients gradients_{*this, life_};
  ShownParams shown_{gradients_};
  bool requested_ = false;  // since the last Unshard
  bool graph_kept_ = false;
};

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_EXTENSION_UNIT_H_
