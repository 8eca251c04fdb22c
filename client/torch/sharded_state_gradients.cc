// From autograd's gradients to the rank's gradient slots, and what a backward leaves to be done at its end.

#include "client/torch/sharded_state.h"

namespace shardd::internal {

void ShardedState::OnGradient(int32_t index, const at::Tensor& gradient) {
  if (job_ == nullptr) {
    throw StatusError(Status(Code::kFailedPrecondition, "use a sharded module: its job is finished"));
  }
  ParamState& param = params_[static_cast<size_t>(index)];
  ThrowIfError(lives_.PrepareGradients(param.group));
  const c10::AutoGradMode no_grad(false);
  const at::Tensor dense = gradient.layout() == at::kStrided ? gradient : gradient.to_dense();
  if (!lives_.HasGradient(param.group, param.index_in_group)) {
    param.gradient.copy_(dense);
  } else {
    param.gradient.add_(dense);  // a second backward() before BackwardDone
  }
  lives_.MarkGradient(param.group, param.index_in_group, /*fresh=*/false);
}

Status ShardedState::BackwardDone(bool last) {
  Status status;
  for (size_t g = 0; g < groups_.size() && status.ok(); ++g) {
    if (groups_[g].trainable) {
      status = lives_.SubmitOwed(static_cast<int32_t>(g));
    }
  }
  if (status.ok()) {
    status = ReshardAll();
  }
  if (status.ok()) {
    status = job_->BackwardDone(last);
  }
  for (size_t g = 0; g < groups_.size(); ++g) {
    lives_.EndForward(static_cast<int32_t>(g));
    lives_.EndBackward(static_cast<int32_t>(g), /*stays=*/false);
  }
  order_.clear();
  return status;
}

void ShardedState::LoadGradientSlots() {
  for (size_t p = 0; p < params_.size(); ++p) {
    ParamState& param = params_[p];
    if (void* data = job_->gradient_data(static_cast<int32_t>(p)); data != nullptr) {
      param.gradient = at::from_blob(data, param.tensors[0].sizes(), at::TensorOptions().dtype(param.unsharded_dtype));
    }
  }
}

}  // namespace shardd::internal
