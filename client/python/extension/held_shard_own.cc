// The gradient of this rank alone, where backward does not synchronise and PyTorch shows it: it is added up in memory
// of the process, which is as large as the whole parameter, and goes to the job with the first gradient that is
// synchronised.

#include <c10/core/GradMode.h>

#include <utility>

#include "client/python/extension/held_shard.h"

namespace shardd::python {

at::Tensor HeldShard::OwnGradient(int64_t first, at::IntArrayRef shape, const at::TensorOptions& options) {
  if (!own_.defined()) {
    own_ = own_numel_ > 0 ? at::zeros({own_numel_}, options) : at::zeros(shape, options);
  }
  return FindOwnGradient(first, shape);
}

at::Tensor HeldShard::FindOwnGradient(int64_t first, at::IntArrayRef shape) const {
  if (!own_.defined() || own_numel_ == 0) {
    return own_;
  }
  return own_.narrow(0, first, c10::multiply_integers(shape)).view(shape);
}

void HeldShard::ShowOwnGradient(at::Tensor on) {
  if (!own_.defined() || own_shown_) {
    return;
  }
  const at::Tensor shown = on.grad();
  if (whole_ && shown.defined()) {
    const c10::AutoGradMode no_grad(false);
    own_ = own_.to(shown.scalar_type()).add_(shown);
  }
  behind_own_ = whole_ ? at::Tensor() : shown;
  on.mutable_grad() = own_;
  own_shown_ = true;
}

void HeldShard::HideOwnGradient(at::Tensor on) {
  if (!std::exchange(own_shown_, false)) {
    return;
  }
  const at::Tensor shown = on.grad();
  if (shown.is_same(own_)) {
    on.mutable_grad() = behind_own_;
  } else if (IsOwnGradient(shown)) {
    own_ = shown;
    on.mutable_grad() = at::Tensor();
  } else {
    own_ = at::Tensor();
  }
  behind_own_ = at::Tensor();
}

void HeldShard::GiveGradient(const at::Tensor& given) {
  if (shows_no_gradient()) {
    return;
  }
  const c10::AutoGradMode no_grad(false);
  if (at::Tensor& shown = sharded_tensor().mutable_grad(); shown.defined()) {
    CheckGradientShape(shown);
    shown.add_(given);
  } else {
    shown = given;
  }
  RunHooks();
}

bool HeldShard::has_own_gradient(const at::Tensor& on) const {
  return own_.defined() && (!own_shown_ || on.grad().is_same(own_) || IsOwnGradient(on.grad()));
}

bool HeldShard::IsOwnGradient(const at::Tensor& shown) const {
  return shown.defined() && (whole_ || !is_plain()) && shown.sizes() == own_.sizes();
}

}  // namespace shardd::python
