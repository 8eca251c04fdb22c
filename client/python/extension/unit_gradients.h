#ifndef SHARDD_CLIENT_PYTHON_EXTENSION_UNIT_GRADIENTS_H_
#define SHARDD_CLIENT_PYTHON_EXTENSION_UNIT_GRADIENTS_H_

#include <ATen/ATen.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "client/fsdp/unit_life.h"
#include "client/python/extension/managed_param.h"
#include "client/python/extension/unit_options.h"

namespace shardd::python {

class Engine;

// The parameters of a unit, and their gradients on the way from autograd into the job (unit_submission.cc) and from
// there to `.grad` (unit_gradients.cc). Owns both, and which of a parameter's gradients the job has. Needs the GIL,
// but for what the comment says.
class UnitGradients {
 public:
  // What the unit is told, and where it is; both outlive this.
  UnitGradients(const UnitOptions& options, const fsdp::UnitLife& life) : options_(options), life_(life) {}
  UnitGradients(const UnitGradients&) = delete;
  UnitGradients& operator=(const UnitGradients&) = delete;

  // REQUIRES: the life is bound. The engine outlives this, or Unbind comes first.
  void Bind(Engine& engine);
  void AddParam(std::shared_ptr<ManagedParam> param);
  void Unbind();
  const std::vector<std::shared_ptr<ManagedParam>>& params() const { return params_; }
  const std::vector<std::shared_ptr<HeldShard>>& shards() const { return shards_; }  // of params()
  std::shared_ptr<ManagedParam> FindParam(int daemon_param) const;                   // null: not here
  // The shard of which it is the first parameter; null: not here.
  HeldShard* FindShard(int daemon_param) const;
  bool HasUnfrozen() const;  // a parameter that the job does not train

  // From autograd, without the GIL or with it: the gradient of params()[index] is complete.
  void OnGradient(size_t index, const at::Tensor& of_autograd);
  // Around the submission of what the group's slot holds, likewise.
  void BeforeSubmit(int group);
  void AfterSubmit(int group);
  void SubmitRest();  // what this backward still owes
  // Before a backward's first gradient: the job is told of gradients of plain tensors that the program has dropped
  // without a step, or has in a tensor of its own (each of another dtype than fp32), to which this rank adds what the
  // job gets from here on. Where it gives none again, ranks that hold nothing of them could not tell. What nobody adds
  // to is written back before a step (Settle).
  void SayDropped();
  // Before the backward is closed: other ranks may give what this one has not given in it.
  void LeaveToOthers();
  void EndBackward();  // what was submitted in it is no more this rank's own
  void AbandonBackward();

  // `hook(gradients)` is called where gradients have been reduced, before they are shown, with pairs (the daemon's
  // number of a shard's first parameter, this rank's shard of what this backward and those before it that were not
  // shown have added up to), which it may write. With options.replaces_reduction they are this rank's own gradients
  // instead, and it returns such pairs, of what `.grad` is to get. None: no hook.
  void SetHook(pybind11::object hook) { hook_ = std::move(hook); }
  bool has_hook() const { return !hook_.is_none(); }
  // REQUIRES: options.replaces_reduction. Nothing where there are none, or they are not to be synchronised.
  void Replace();
  bool HasPending() const;  // the job has one that `.grad` is to show
  // It may have one without HasPending, which others gave alone.
  bool MayLack() const;
  // Others gave these of the daemon's parameters, in ascending order, and so the job has them.
  void TakeFromOthers(const std::vector<int32_t>& given);
  void Show();
  // FAILED_PRECONDITION where one is not: it is not synchronised.
  void CheckShown() const;
  // What `.grad` says is what the job has. For a step only of what the daemon's optimizer has, as its step takes it; of
  // one of several optimizers nothing is said of what the others have.
  enum class For { kStep, kStepOfSeveral, kOther };
  void Settle(For what);
  // This rank's own gradients (held_shard_own.cc) are `.grad` between backwards.
  void ShowOwn();
  void HideOwn();
  // Adds the daemon's numbers of parameters whose gradients of earlier steps nobody shows or holds.
  void AddUnseen(std::vector<int>* params) const;
  // `counts` (null: none): by the daemon's parameters, one more for each that was updated.
  // `in_trainers`: made by an optimizer of torch's, after which the job has the gradients still.
  void EndStep(float* counts, bool in_trainers);
  // The same of one of several optimizers: what the others have stays as it is, also shown, in a step of this number.
  void EndPart(float* counts, int64_t steps);

  // Points all to the job's memory: parameters' shards, gradients and optimizer state.
  void LoadMemory();
  // The attachment is over, and with it the gradients. `keeps_gradients`: the job has lost nothing, so the program
  // keeps what it has not dropped, in memory of its own.
  void ForgetMemory(bool keeps_gradients);
  // The shards get memory of their own, which may be written.
  void CopyShardsOut();

 private:
  struct Group {
    int id = 0;
    bool trainable = false;
    std::vector<size_t> params;  // indices into params_, by the daemon's index
  };
  fsdp::GroupLives& lives() const;
  const Group& group_of(int id) const;
  bool in_slot(const ManagedParam& param) const;  // this backward's gradient is there, not submitted
  bool KeepsOwn(const ManagedParam& param) const {
    return options_.replaces_reduction ||
           (!options_.reduce_grads && param.keeps_own_gradient(!options_.reshard_after_backward));
  }
  void LeaveToOthers(ManagedParam& param);
  // What backwards without synchronisation have left, of parameters without a gradient in this one.
  void SubmitOwn();
  // Parameters of a flat parameter that has got a gradient in this backward, and they have not.
  void CompleteFlat();
  void CallHook();

  const UnitOptions& options_;
  const fsdp::UnitLife& life_;
  Engine* engine_ = nullptr;
  std::vector<Group> groups_;  // of the life
  std::vector<std::shared_ptr<ManagedParam>> params_;
  std::vector<std::shared_ptr<HeldShard>> shards_;
  pybind11::object hook_ = pybind11::none();
};

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_EXTENSION_UNIT_GRADIENTS_H_
