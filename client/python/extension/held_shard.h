#ifndef SHARDD_CLIENT_PYTHON_EXTENSION_HELD_SHARD_H_
#define SHARDD_CLIENT_PYTHON_EXTENSION_HELD_SHARD_H_

// What a PyTorch user holds of this rank's shard of one parameter, or of a flat parameter: the sharded Parameter over
// the job's shards, its `.grad` over the job's gradient shards, the optimizer's state. fully_shard's are DTensors over
// whole rows; in layout flat they are plain tensors. Every member function needs the GIL, unless it says otherwise.

#include <ATen/ATen.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace shardd::python {

class HeldShard {
 public:
  struct Options {
    std::string fqn;
    // The shard begins `first_element` elements behind the beginning of the daemon's parameter; before it, where a flat
    // parameter is held by its first parameter.
    int daemon_param = -1;
    int64_t first_element = 0;
    bool trainable = false;  // the job has a gradient shard for it
    // Of what `.grad` shows; the job adds up in fp32. Another dtype is a copy: what the program makes of it is copied
    // back where the job reads it.
    at::ScalarType gradient_dtype = at::kFloat;
    // Elements [first, end) of the shard that belong to no parameter.
    std::vector<std::pair<int64_t, int64_t>> padding;
    // Of a rank's own gradient (see AddOwnGradient). `whole`: the shard is all of its parameter (NO_SHARD).
    // `own_numel`: of a flat parameter; 0: the own gradient has its parameter's shape.
    bool whole = false;
    int64_t own_numel = 0;
  };
  // `local`: the sharded parameter's tensor on this rank, alone in its storage. `make_gradient(local)` wraps a local
  // tensor as the parameter's DTensor; none: plain tensors.
  HeldShard(Options options, pybind11::object sharded, at::Tensor local, pybind11::object make_gradient);

  const std::string fqn;
  const int daemon_param;
  const int64_t first_element;
  const bool trainable;

  // The shard, read-only memory of the job, takes the place of what the local tensor held. Its views follow.
  void PointShard(const void* data);
  // The program has given the parameter another storage (`p.data = ...`), which is not looked for in DTensors: they
  // have none of their own.
  bool IsRestored() const;
  // INVALID_ARGUMENT where `given`, the parameter or what takes its place, has another shape than the shard.
  void CheckShape(const at::Tensor& given) const;
  // What the parameter shows is copied to where the shard lies, which must be writable, and the parameter lies there
  // again, in the shard's dtype. REQUIRES: CheckShape.
  void TakeRestored();
  // The parameter `given` takes the place of the one held so far, which keeps its values and its gradient in memory of
  // its own; otherwise as TakeRestored.
  void TakeObject(pybind11::object given);
  // An original parameter of which this rank has no element: its `.grad` stays None, as in PyTorch. The job does not
  // look at what such a rank says of a gradient.
  bool shows_no_gradient() const { return is_plain() && local_.numel() == 0; }
  bool is_plain() const { return make_gradient_.is_none(); }
  // The local tensor gets memory of its own, with the values it shows now.
  void CopyShardOut();
  // The job is over: `.grad` and optimizer state stay, with the values they have.
  void ForgetShard();
  // The job's memory is going away. Whoever holds its gradient keeps it, with its values; `.grad`, too.
  void LeaveGradient();
  // The job's memory is going away, and with it the gradient: `.grad` is None.
  void ForgetGradient();
  // In a forked child, where the job's memory is not mapped: every later use raises `message`.
  void LoseMemory(const std::string& message);

  // Optimizer state `index` of the shard: `local`, alone in its storage and with at most 4 bytes an element, lies from
  // now on where the parameter's state, which begins at `state`, has the shard's elements; or at `state` itself
  // (`whole`), where a state has no element for each of the parameter's. `copy_in` puts its values there first. What
  // was there before keeps its values elsewhere.
  void AdoptState(size_t index, const at::Tensor& local, float* state, bool whole, bool copy_in);
  size_t state_count() const { return states_.size(); }
  void PointState(size_t index, float* state);
  void SetGradientMemory(void* gradient_shard) { gradient_memory_ = gradient_shard; }

  // Before the first gradient of a parameter, none of which the job holds unshown, is submitted: whether it replaces
  // what the job holds. Keeps the values of gradients that the user still holds. `alone`: it always does, and what the
  // job holds is added when it is shown. May be called without the GIL.
  bool BeginGradient(int64_t steps, bool alone);
  // Before a gradient is submitted, of whichever rank and parameter of the group: the daemon may add to the job's
  // gradient from then on, at any moment. Where autograd may do so, too (see TakeLateGradient), or the program before
  // it is shown, `.grad` has its values in memory of its own until then, and what is added to it there is added to the
  // job's afterwards. What the job is told is the same with and without: ranks differ in it. May be called without the
  // GIL.
  void LeaveGradientToJob(int64_t steps, bool shown_after_backward);
  // The same of a gradient that this rank has not given so far in the backward, and others may give: where theirs would
  // replace what the job holds, what `.grad` shows is kept and added to it, as BeginGradient does for an own one.
  // May be called without the GIL.
  void LeaveGradientToOthers(int64_t steps, bool alone);
  // The end of either, where ShowGradient does not come. REQUIRES: the job is not adding gradients.
  bool is_left_to_job() const { return carried_from_job_.defined(); }
  void TakeGradientFromJob();
  // A step of the daemon has used what the job had, which the next gradient replaces.
  void ForgetInJob() { carried_from_job_ = at::Tensor(); }
  // The job's gradient is complete: `.grad` shows it; hooks run, and the parameter's optimizers in backward.
  void ShowGradient(int64_t steps);
  // What is shown as of the step before `steps` is of that one.
  void StayCurrent(int64_t steps) { gradient_step_ += gradient_step_ == steps - 1 ? 1 : 0; }
  // The program's own code has reduced it: `.grad` is `given`, or that is added to what `.grad` is; hooks run as above.
  // REQUIRES: of plain tensors, of the shard's shape and the dtype that `.grad` has.
  void GiveGradient(const at::Tensor& given);
  // What `.grad` says before the job reads it. kOther is not what was shown last: an earlier step's, or
  // the program's own, which has been copied into the job's memory.
  enum class Shown { kNone, kCurrent, kOther };
  // `stepping`: of what it has only.
  Shown SettleGradient(int64_t steps, bool stepping);
  void TakeGradient(int64_t steps);
  // Nobody shows or holds what the job has of an earlier step.
  bool GradientIsUnseen() const;
  // What the job has, fp32, in its memory.
  at::Tensor gradient_shard() const;
  // `.grad` has what the job was shown to hold of the gradient, in a tensor of the program's own, or shows none. What
  // the job still has of it is then not to be added to.
  bool HasGradientElsewhere();

  // This rank's own gradient (held_shard_own.cc): what backward without synchronisation gives, where PyTorch shows it.
  // `on`, which shows it as `.grad` between backwards, is the sharded parameter of plain tensors, else the unsharded
  // one.
  //
  // This rank's own gradient so far, zeros at first, to be added to; elements from `first` on, of `shape`. May be
  // called without the GIL. REQUIRES: a backward is under way, so it is not shown.
  at::Tensor OwnGradient(int64_t first, at::IntArrayRef shape, const at::TensorOptions& options);
  // Undefined: there is none. REQUIRES: as OwnGradient.
  at::Tensor FindOwnGradient(int64_t first, at::IntArrayRef shape) const;
  // `on.grad` is the own gradient from here on, over what the job has given; where the shard is whole, added to that.
  void ShowOwnGradient(at::Tensor on);
  // `on.grad` is again what the job has given. What the program has made of the own gradient counts; None drops it.
  void HideOwnGradient(at::Tensor on);
  // There is one, which the program has not dropped.
  bool has_own_gradient(const at::Tensor& on) const;
  // It is submitted.
  void DropOwnGradient() { own_ = at::Tensor(); }
  // It is the caller's from here on. Undefined: there is none. REQUIRES: as OwnGradient.
  at::Tensor TakeOwnGradient() { return std::exchange(own_, at::Tensor()); }

  int64_t element_bytes() const { return static_cast<int64_t>(local_.element_size()); }  // of the stored parameter
  // Never held as a tensor: module.to() swaps what is behind the Python object, and counts references.
  const at::Tensor& sharded_tensor() const;
  pybind11::handle sharded() const { return sharded_; }

  bool updated = true;  // by the daemon's optimizer: it has the parameter
  bool to_show = false;

 private:
  // Leaves it to whoever holds it, with its values.
  void CopyGradientOut();
  void MakeGradient();
  void CheckGradientShape(const at::Tensor& rows) const;
  bool GradientIsHeldElsewhere() const;
  // `.grad` is the tensor that shows the job's gradient; another storage that the program has given to it counts as
  // the program's own.
  bool IsOurs(const at::Tensor& shown);
  at::Tensor LocalOf(const at::Tensor& gradient) const;
  // What `.grad` has by now is what the job's gradient is added to. Autograd may have given the parameter itself more
  // since BeginGradient: of a term of the loss that was made of sharded parameters before the forward, whose backward
  // is last.
  void TakeLateGradient();
  // `.grad`, where it is the job's, shows `memory`: the job's, or its own values while the job's is written anew.
  void PointGradient(void* memory);
  // `shown`, which took the place of the own gradient, is one.
  bool IsOwnGradient(const at::Tensor& shown) const;
  // To what the job has.
  void AddCarry();
  void DropCarry();
  // Lets `.grad` be what the job has.
  void Assign();
  void RunHooks();
  void RunOptimizersInBackward();

  pybind11::object sharded_;
  at::Tensor local_;
  const pybind11::object make_gradient_;
  const at::ScalarType gradient_dtype_;
  const std::vector<std::pair<int64_t, int64_t>> padding_;
  void* gradient_memory_ = nullptr;  // of this shard
  pybind11::object gradient_;        // as users see it; none until first shown
  pybind11::object gradient_local_;
  c10::intrusive_ptr<c10::StorageImpl> gradient_storage_;
  Py_ssize_t gradient_references_ = 0;  // of each, when nobody else held them
  Py_ssize_t local_references_ = 0;
  size_t storage_references_ = 0;
  int64_t gradient_step_ = -1;  // steps made when it was shown last
  std::vector<at::Tensor> states_;
  std::vector<bool> state_is_whole_;  // by state
  // What is to be added to the job's gradient, where `.grad` shows that while the job's is written: what it showed
  // before a step and was not set to None since, or what it showed in this step. The latter less what of it the job has
  // already.
  at::Tensor carry_;
  at::Tensor carried_from_job_;
  bool carries_all_ = false;  // what others give replaces what the job had: all of carry_ is added to it
  const bool whole_;
  const int64_t own_numel_;
  at::Tensor own_;
  at::Tensor behind_own_;  // what `.grad` shows otherwise, while it shows own_
  bool own_shown_ = false;
};

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_EXTENSION_HELD_SHARD_H_
