#ifndef SHARDD_CLIENT_PYTHON_EXTENSION_MANAGED_PARAM_H_
#define SHARDD_CLIENT_PYTHON_EXTENSION_MANAGED_PARAM_H_

// One parameter of the model while it is computed with: the unsharded tensor, a storage that shows the whole while its
// group is unsharded, where the modules have it, and its gradient on the way into the job. What the user holds between
// forward and backward is its HeldShard; those of one flat parameter share theirs. Every member function needs the GIL,
// unless it says otherwise.

#include <ATen/ATen.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/python/extension/held_shard.h"
#include "client/python/extension/shard_order.h"
#include "client/torch/parameter_storage.h"
#include "client/torch/torch_versions.h"

namespace shardd::python {

// Where a module holds the parameter.
struct Place {
  pybind11::object parameters;  // module._parameters
  pybind11::object name;
  pybind11::object module;  // a weak reference, where the module overrides __setattr__; else none

  // What is there; null: nothing.
  PyObject* current() const { return PyDict_GetItem(parameters.ptr(), name.ptr()); }
  void Put(pybind11::handle param) const;
};

// FAILED_PRECONDITION: a step of the daemon's optimizer would not see a gradient that this rank has.
void RaiseNotSynchronised(const std::string& fqn);

// torch.nn.Parameter, which may take the place of another one.
bool IsParameter(PyObject* object);

class ManagedParam {
 public:
  struct Options {
    std::string fqn;
    int daemon_param = -1;
    size_t unit_group = 0;   // which of the unit's groups
    int index_in_group = 0;  // its bit in masks
    bool trainable = false;  // the job has a gradient slot for it
    int64_t shard_dim = 0;   // which dimension is cut, in how many equal parts
    int64_t shard_parts = 1;
    RowsInJob rows;               // of a parameter that is cut over some ranks of the job alone
    int64_t own_first = 0;        // where its own gradient begins in that of its flat parameter
    double mesh_scale = 1;        // ranks of its unit's mesh for each of its own
    bool shows_unsharded = true;  // the unsharded parameter shows own gradients, where the program can see it
    bool gathers_itself = false;  // SetUnsharded, instead of the job's memory, says what is computed with
  };
  // `unsharded`: a leaf that is given its storage here. A DTensor (tensor parallel) comes with `local_gradient`, which
  // returns this rank's part of a gradient of it: the daemon knows local tensors alone. Else that is none.
  ManagedParam(Options options, std::shared_ptr<HeldShard> shard, pybind11::object unsharded,
               pybind11::object local_gradient);

  const std::string fqn;
  const int daemon_param;
  const size_t unit_group;
  const int index_in_group;
  const bool trainable;
  const double mesh_scale;

  // Puts the unsharded or the sharded parameter into modules. False: the program has put another one there meanwhile,
  // which is there no more.
  bool Register(const std::vector<Place>& places, bool unsharded);
  // While it is unsharded: false, and all as it was, where the program has put another object into a module, or has
  // given this one another storage.
  bool RestoreUnsharded(const std::vector<Place>& places);
  // Units that compute with a tied parameter each show it; it is cleared with the last. Where the job has it in another
  // order it is a copy, until then.
  void PointUnsharded(const void* data);
  // Of a tensor subclass with fsdp_post_all_gather: what that has made, in whose place modules have had nothing yet.
  void SetUnsharded(pybind11::object unsharded);
  void ClearUnsharded();
  // Somebody has written into such a copy since this was asked last, which nothing else notices.
  bool TakeWritten();
  // All of it, or of its gradient, as the job has it on `device`, into `out`, contiguous and of the parameter's shape,
  // wherever that is. Needs no GIL.
  void CopyOut(const void* in_job, at::Device device, at::Tensor& out) const;
  // The job is over, or its memory is not mapped any more.
  void Forget();
  void DropOwnGradient();
  void LoseMemory();
  void SetGradientSlot(void* slot);

  // Before this backward's first gradient is submitted: whether it replaces what the job holds. May be called without
  // the GIL.
  bool BeginGradient(int64_t steps, bool alone) { return !pending && shard_->BeginGradient(steps, alone); }
  // What the job is to be told, so that it has what `.grad` says: nothing, or whether this rank has a gradient.
  // `stepping`: a step of the daemon's optimizer comes, which wants all of it shown.
  enum class Presence { kAsIs, kDropped, kGiven };
  Presence SettleGradient(HeldShard::Shown shown, bool stepping);
  // A gradient was written into the job: `.grad` shows it. No hooks run.
  void TakeGradient(int64_t steps);

  HeldShard& shard() { return *shard_; }
  const std::shared_ptr<HeldShard>& shared_shard() const { return shard_; }
  bool requires_grad() const { return shard_->sharded_tensor().requires_grad(); }
  // `scale` times `gradient`, of the parameter's shape, into the slot, or added to what is there.
  void WriteGradient(const at::Tensor& gradient, double scale, bool add);
  // What of autograd's gradient goes into the job. May be called without the GIL.
  at::Tensor LocalGradient(const at::Tensor& gradient) const;
  // Zeros, as a local gradient.
  at::Tensor ZeroGradient() const;
  // This rank's own gradient (see HeldShard), which backward without synchronisation adds to. `stays_unsharded`: after
  // that backward the program sees the unsharded parameter.
  bool keeps_own_gradient(bool stays_unsharded) const {
    return shard_->is_plain() || (stays_unsharded && shows_unsharded_);
  }
  void AddOwnGradient(const at::Tensor& gradient);
  void ShowOwnGradient() { shard_->ShowOwnGradient(own_shown_on()); }
  void HideOwnGradient() { shard_->HideOwnGradient(own_shown_on()); }
  bool has_own_gradient() const { return trainable && shard_->has_own_gradient(own_shown_on()); }
  // `scale` times it, to what WriteGradient has put into the slot.
  void WriteOwnGradient(double scale);
  bool pending = false;      // the job holds a gradient that `.grad` does not show yet
  bool in_job = false;       // the next step updates with what was submitted
  bool left_in_job = false;  // a step of torch's optimizer has used it, and the job has it still
  bool contributed = false;  // something was submitted in this backward

  void InstallAccumulator(NodePtr node);

 private:
  void WriteRows(const at::Tensor& dense, double scale, bool add);
  const at::Tensor& own_shown_on() const { return shard_->is_plain() ? shard_->sharded_tensor() : unsharded_tensor_; }

  const std::shared_ptr<HeldShard> shard_;
  pybind11::object unsharded_;
  at::Tensor unsharded_tensor_;
  const at::Tensor local_;  // the same, or a DTensor's local tensor
  const pybind11::object local_gradient_;
  const ShardOrder order_;
  const int64_t own_first_;
  const bool shows_unsharded_;
  const bool gathers_itself_;
  ParameterStorage storage_;
  c10::DataPtr copy_;  // what the storage shows, where the job has another order
  uint32_t copy_version_ = 0;
  bool written_ = false;
  int users_ = 0;
  NodePtr accumulator_;
  // Unsharded dtype, split by shards where the job has another order, all that the job has where it has more rows than
  // these; undefined: frozen.
  at::Tensor slot_;
};

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_EXTENSION_MANAGED_PARAM_H_
