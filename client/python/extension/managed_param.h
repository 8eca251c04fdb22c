#ifndef SHARDD_CLIENT_PYTHON_EXTENSION_MANAGED_PARAM_H_
#define SHARDD_CLIENT_PYTHON_EXTENSION_MANAGED_PARAM_H_

// One parameter as a PyTorch user holds it: the sharded Parameter, a DTensor over this rank's rows of the job's shards;
// the unsharded Parameter, a storage that shows the whole while its group is unsharded; the gradient, a DTensor over
// this rank's rows of the gradient shards. Every member function needs the GIL, unless it says otherwise.

#include <ATen/ATen.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/torch/parameter_storage.h"

namespace shardd::python {

// Where a module holds the parameter.
struct Place {
  pybind11::object parameters;  // module._parameters
  pybind11::object name;
  pybind11::object module;  // a weak reference, where the module overrides __setattr__; else none
};

class ManagedParam {
 public:
  struct Options {
    std::string fqn;
    int daemon_param = -1;
    size_t unit_group = 0;      // which of the unit's groups
    int index_in_group = 0;     // its bit in masks
    int64_t first_element = 0;  // of this rank's rows
    bool trainable = false;     // the job has a gradient slot and a gradient shard for it
  };
  // `local` is the sharded parameter's local tensor; `unsharded` a Parameter that is given its storage here;
  // `make_gradient(local)` wraps a local tensor as the parameter's DTensor.
  ManagedParam(Options options, pybind11::object sharded, at::Tensor local, pybind11::object unsharded,
               std::vector<Place> places, pybind11::object make_gradient);

  const std::string fqn;
  const int daemon_param;
  const size_t unit_group;
  const int index_in_group;
  const int64_t first_element;
  const bool trainable;

  // Puts the unsharded or the sharded parameter into the modules.
  void Register(bool unsharded);
  void PointUnsharded(const void* data) { storage_.PointTo(data); }
  void ClearUnsharded() { storage_.Clear(); }
  // The shard, read-only memory of the job, takes the place of what the local tensor held. Its views follow.
  void PointShard(const void* data);
  // The local tensor gets memory of its own, with the values it shows now.
  void CopyShardOut();
  // As CopyShardOut for the gradient, so that whoever holds it keeps its values.
  void CopyGradientOut();
  // The job is over: `.grad` and optimizer state stay, with the values they have.
  void ForgetShard();
  // The job's memory is going away, and with it the gradient.
  void ForgetGradient();
  // In a forked child, where the job's memory is not mapped: every later use raises.
  void LoseMemory();

  // Optimizer state `index` of this rank's rows: `local`, alone in its storage and with at most 4 bytes an element,
  // lies at `rows` from now on; `copy_in` puts its values there first. What was there before keeps its values
  // elsewhere.
  void AdoptState(size_t index, const at::Tensor& local, void* rows, bool copy_in);
  size_t state_count() const { return states_.size(); }
  void PointState(size_t index, void* rows);
  void SetGradientMemory(void* slot, void* gradient_shard);

  // Before this backward's first gradient is submitted: whether it replaces what the job holds. Keeps the values of
  // gradients that the user still holds. May be called without the GIL.
  bool BeginGradient(int64_t steps);
  // The job's gradient of this parameter is complete: `.grad` shows it, hooks run.
  void ShowGradient(int64_t steps);
  // What the job is to be told, so that it has what `.grad` says: nothing, or whether this rank has a gradient. One
  // that the program assigned is copied into the job's memory. `stepping`: a step of the daemon's optimizer comes,
  // which takes only what it has and wants all of it shown.
  enum class Presence { kAsIs, kDropped, kGiven };
  Presence SettleGradient(int64_t steps, bool stepping);
  // A gradient was written into the job: `.grad` shows it. No hooks run.
  void TakeGradient(int64_t steps);
  // This rank's rows of what the job has, fp32, in its memory.
  at::Tensor gradient_shard() const;

  int64_t element_bytes() const { return static_cast<int64_t>(local_.element_size()); }  // of the stored parameter
  // Never held as a tensor: module.to() swaps what is behind the Python object, and counts references.
  const at::Tensor& sharded_tensor() const;
  at::Tensor& slot() { return slot_; }
  bool in_slot = false;      // this backward's gradient is there, not submitted
  bool pending = false;      // the job holds a gradient that `.grad` does not show yet
  bool in_job = false;       // the next step updates with what was submitted
  bool updated = true;       // by the daemon's optimizer: it has the parameter
  bool contributed = false;  // something was submitted in this backward

  void InstallAccumulator(c10::intrusive_ptr<torch::autograd::Node> node);
  bool accumulator_installed() const { return accumulator_ != nullptr; }

 private:
  void MakeGradient();
  void ReleaseGradientMemory();
  bool GradientIsHeldElsewhere() const;

  pybind11::object sharded_;
  at::Tensor local_;
  pybind11::object unsharded_;
  const at::Tensor unsharded_tensor_;
  const std::vector<Place> places_;
  const pybind11::object make_gradient_;
  ParameterStorage storage_;
  c10::intrusive_ptr<torch::autograd::Node> accumulator_;
  at::Tensor slot_;  // unsharded dtype; undefined for a frozen parameter

  void* gradient_memory_ = nullptr;  // this rank's rows
  pybind11::object gradient_;        // the DTensor; none until first shown
  pybind11::object gradient_local_;
  c10::intrusive_ptr<c10::StorageImpl> gradient_storage_;
  Py_ssize_t gradient_references_ = 0;  // of each, when nobody else held them
  Py_ssize_t local_references_ = 0;
  size_t storage_references_ = 0;
  int64_t gradient_step_ = -1;  // steps made when it was shown last
  std::vector<at::Tensor> states_;
  at::Tensor carry_;  // what `.grad` showed before a step and was not set to None since
};

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_EXTENSION_MANAGED_PARAM_H_
