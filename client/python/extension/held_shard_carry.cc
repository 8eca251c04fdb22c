// What `.grad` gets while the daemon adds to the job's gradient: a term of the loss that was made of sharded parameters
// before the forward is last in the backward, when gradients of the layers have been submitted, and autograd adds it in
// place where `.grad` lies. In the job's memory, of two who add at once one would lose.

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include "client/python/extension/held_shard.h"

namespace shardd::python {

void HeldShard::LeaveGradientToJob(int64_t steps, bool shown_after_backward) {
  if (carry_.defined() || !gradient_ || gradient_step_ != steps || local_.numel() == 0 ||
      (shown_after_backward && torch::autograd::impl::try_get_grad_accumulator(sharded_tensor()) == nullptr)) {
    return;
  }
  const py::gil_scoped_acquire gil;
  if (const at::Tensor& shown = sharded_tensor().grad(); shown.defined() && IsOurs(shown)) {
    const c10::AutoGradMode no_grad(false);
    carried_from_job_ = gradient_shard().clone();
    carry_ = carried_from_job_.clone();
    PointGradient(carry_.mutable_data_ptr());
  }
}

void HeldShard::LeaveGradientToOthers(int64_t steps, bool alone) {
  if (carry_.defined() || !gradient_ || shows_no_gradient() || local_.numel() == 0) {
    return;
  }
  const at::Tensor& shown = sharded_tensor().grad();
  const py::gil_scoped_acquire gil;
  if (shown.defined() && IsOurs(shown)) {
    if (gradient_step_ == steps && !alone) {
      return;  // theirs are added to it
    }
    const c10::AutoGradMode no_grad(false);
    carried_from_job_ = gradient_shard().clone();
    carry_ = carried_from_job_.clone();
    carries_all_ = true;
    PointGradient(carry_.mutable_data_ptr());
  } else if (gradient_ && GradientIsHeldElsewhere()) {
    CopyGradientOut();
  }
}

bool HeldShard::HasGradientElsewhere() {
  const at::Tensor& shown = sharded_tensor().grad();
  return !shown.defined() || !IsOurs(shown);
}

void HeldShard::TakeGradientFromJob() {
  if (!carried_from_job_.defined()) {
    return;
  }
  if (const at::Tensor& shown = sharded_tensor().grad(); shown.defined() && IsOurs(shown)) {
    PointGradient(gradient_memory_);
    AddCarry();
  } else {
    CopyGradientOut();  // whoever holds it still
  }
  DropCarry();
}

void HeldShard::AddCarry() {
  if (!carry_.defined()) {
    return;
  }
  const c10::AutoGradMode no_grad(false);
  at::Tensor local = THPVariable_Unpack(gradient_local_.ptr());
  if (carried_from_job_.defined()) {  // where nothing was added, infinities are left alone, too
    local.add_(at::where(carry_ == carried_from_job_, at::zeros({}, carry_.options()), carry_ - carried_from_job_));
  } else {
    local.add_(carry_);
  }
  DropCarry();
}

void HeldShard::DropCarry() {
  if (carry_.defined()) {
    PointGradient(gradient_memory_);  // `.grad` may lie there
  }
  carry_ = at::Tensor();
  carried_from_job_ = at::Tensor();
  carries_all_ = false;
}

}  // namespace shardd::python
