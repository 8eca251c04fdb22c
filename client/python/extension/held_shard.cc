#include "client/python/extension/held_shard.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <sstream>
#include <utility>

#include "client/python/extension/errors.h"
#include "client/python/extension/memory.h"
#include "client/python/extension/tensors.h"
#include "client/torch/torch_versions.h"

namespace shardd::python {
namespace {

// Moves the storage's bytes into memory of its own. Where a GPU has none, beside the job's, later uses raise.
void CopyOut(c10::StorageImpl* storage, const std::string& fqn) {
  const size_t size_bytes = storage->nbytes();
  try {
    c10::DataPtr copy = Allocate(size_bytes, storage->device());
    CopyBytes(copy.get(), storage->data(), size_bytes, storage->device());
    storage->set_data_ptr_noswap(std::move(copy));
  } catch (const c10::OutOfMemoryError&) {
    LoseStorage(storage,
                "use of parameter \"" + fqn +
                    "\", its gradient or optimizer state: the job's memory is gone, and the GPU had none for a "
                    "copy; save them before the job ends");
  }
}

}  // namespace

HeldShard::HeldShard(Options options, py::object sharded, at::Tensor local, py::object make_gradient)
    : fqn(std::move(options.fqn)),
      daemon_param(options.daemon_param),
      first_element(options.first_element),
      trainable(options.trainable),
      sharded_(std::move(sharded)),
      local_(std::move(local)),
      make_gradient_(std::move(make_gradient)),
      gradient_dtype_(options.gradient_dtype),
      padding_(std::move(options.padding)),
      whole_(options.whole),
      own_numel_(options.own_numel) {}

const at::Tensor& HeldShard::sharded_tensor() const { return THPVariable_Unpack(sharded_.ptr()); }

void HeldShard::PointShard(const void* data) {
  if (local_.numel() == 0) {
    return;  // a rank that has nothing of it
  }
  const size_t size_bytes = local_.nbytes();
  c10::StorageImpl* storage = StorageOf(local_);
  PointStorage(storage, at::DataPtr(const_cast<void*>(data), local_.device()));
  storage->set_nbytes(size_bytes);
  storage->set_resizable(false);
}

bool HeldShard::IsRestored() const {
  if (!is_plain()) {
    return false;
  }
  const at::Tensor& shown = sharded_tensor();
  return StorageOf(shown) != StorageOf(local_) || shown.sizes() != local_.sizes();
}

void HeldShard::CheckShape(const at::Tensor& given) const {
  if (given.sizes() == local_.sizes()) {
    return;
  }
  std::ostringstream text;
  text << "write back parameter \"" << fqn << "\": Cannot writeback when the parameter shape changes (got "
       << given.sizes() << ", want " << local_.sizes() << ", this rank's piece of it)";
  Check(Status(Code::kInvalidArgument, text.str()));
}

void HeldShard::TakeRestored() {
  const c10::AutoGradMode no_grad(false);
  at::Tensor shown = sharded_tensor();
  if (StorageOf(shown) != StorageOf(local_)) {
    local_.copy_(shown.detach());
  }
  shown.set_data(local_);
}

void HeldShard::TakeObject(py::object given) {
  const c10::AutoGradMode no_grad(false);
  at::Tensor before = sharded_tensor();
  CopyGradientOut();
  DropCarry();
  if (StorageOf(before) == StorageOf(local_)) {
    before.set_data(before.detach().clone());
  }
  sharded_ = std::move(given);
  TakeRestored();
}

void HeldShard::CopyShardOut() {
  if (local_.numel() > 0) {
    CopyOut(StorageOf(local_), fqn);
  }
}

void HeldShard::CopyGradientOut() {
  if (gradient_ && gradient_storage_->nbytes() > 0 && gradient_storage_.use_count() > 1) {
    CopyOut(gradient_storage_.get(), fqn);
  }
  gradient_ = py::object();
  gradient_local_ = py::object();
  gradient_storage_.reset();
}

void HeldShard::LeaveGradient() {
  CopyGradientOut();
  gradient_memory_ = nullptr;
  DropCarry();
}

void HeldShard::ForgetGradient() {
  LeaveGradient();
  sharded_tensor().mutable_grad() = at::Tensor();
  own_ = behind_own_ = at::Tensor();
  own_shown_ = false;
}

void HeldShard::ForgetShard() {
  LeaveGradient();
  for (at::Tensor& state : states_) {
    if (state.defined() && state.numel() > 0) {
      CopyOut(StorageOf(state), fqn);
    }
  }
  states_.clear();
}

void HeldShard::AdoptState(size_t index, const at::Tensor& local, float* of_param, bool whole, bool copy_in) {
  if (index >= states_.size()) {
    states_.resize(index + 1);
    state_is_whole_.resize(index + 1);
  }
  at::Tensor& state = states_[index];
  if (state.defined() && !state.is_same(local) && state.numel() > 0) {
    CopyOut(StorageOf(state), fqn);
  }
  state = local;
  state_is_whole_[index] = whole;
  if (copy_in) {
    CopyBytes(of_param + (whole ? 0 : first_element), local.const_data_ptr(), local.nbytes(), local.device());
  }
  PointState(index, of_param);
}

void HeldShard::PointState(size_t index, float* of_param) {
  const at::Tensor& state = states_[index];
  float* const rows = of_param + (state_is_whole_[index] ? 0 : first_element);
  if (state.defined() && state.numel() > 0) {
    StorageOf(state)->set_data_ptr_noswap(at::DataPtr(rows, state.device()));
    StorageOf(state)->set_resizable(false);
  }
}

void HeldShard::LoseMemory(const std::string& message) {
  if (local_.numel() > 0) {
    LoseStorage(StorageOf(local_), message);
  }
  if (gradient_storage_ != nullptr) {
    LoseStorage(gradient_storage_.get(), message);
  }
  for (const at::Tensor& state : states_) {
    if (state.defined() && state.numel() > 0) {
      LoseStorage(StorageOf(state), message);
    }
  }
  gradient_memory_ = nullptr;
}

void HeldShard::MakeGradient() {
  const c10::AutoGradMode no_grad(false);
  at::Tensor local = at::empty({0}, at::TensorOptions().dtype(at::kFloat).device(local_.device()));
  gradient_storage_ = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<size_t>(local_.numel()) * sizeof(float),
      at::DataPtr(gradient_memory_, local_.device()), /*allocator=*/nullptr, /*resizable=*/false);
  local.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(gradient_storage_));
  local.unsafeGetTensorImpl()->set_sizes_contiguous(local_.sizes());
  gradient_local_ = py::reinterpret_steal<py::object>(THPVariable_Wrap(local));
  local = at::Tensor();
  gradient_ = make_gradient_.is_none() ? gradient_local_ : make_gradient_(gradient_local_);
  gradient_references_ = Py_REFCNT(gradient_.ptr());
  local_references_ = Py_REFCNT(gradient_local_.ptr());
  storage_references_ = gradient_storage_.use_count();
}

void HeldShard::CheckGradientShape(const at::Tensor& rows) const {
  if (rows.sizes() != local_.sizes()) {
    std::ostringstream text;
    text << "write back the gradient of \"" << fqn << "\": Cannot writeback when the gradient shape changes (got "
         << rows.sizes() << ", want " << local_.sizes() << ", as its parameter has on this rank)";
    Check(Status(Code::kInvalidArgument, text.str()));
  }
}

bool HeldShard::GradientIsHeldElsewhere() const {
  return Py_REFCNT(gradient_.ptr()) > gradient_references_ || Py_REFCNT(gradient_local_.ptr()) > local_references_ ||
         gradient_storage_.use_count() > storage_references_;
}

at::Tensor HeldShard::LocalOf(const at::Tensor& gradient) const {
  if (make_gradient_.is_none()) {
    return gradient;
  }
  const py::object wrapped = py::reinterpret_steal<py::object>(THPVariable_Wrap(gradient));
  return THPVariable_Unpack(py::object(wrapped.attr("_local_tensor")).ptr());
}

bool HeldShard::IsOurs(const at::Tensor& shown) {
  if (!gradient_ || !shown.is_same(THPVariable_Unpack(gradient_.ptr()))) {
    return false;
  }
  if (is_plain() && StorageOf(shown) != gradient_storage_.get()) {
    CopyGradientOut();  // `p.grad.data = ...`; views of what it was go on showing that
    return false;
  }
  return true;
}

bool HeldShard::BeginGradient(int64_t steps, bool alone) {
  if (shows_no_gradient()) {
    return false;
  }
  const at::Tensor& shown = sharded_tensor().grad();
  if (!shown.defined()) {
    if (gradient_) {
      const py::gil_scoped_acquire gil;
      if (GradientIsHeldElsewhere()) {
        CopyGradientOut();
      }
    }
    DropCarry();
    return true;
  }
  const py::gil_scoped_acquire gil;
  const bool ours = IsOurs(shown);
  if (ours && gradient_step_ == steps && !alone) {
    return false;
  }
  // Shown before a step, the user's own, or not to be mixed with it: the job will hold the new gradient alone, so this
  // is added afterwards.
  const c10::AutoGradMode no_grad(false);
  const at::Tensor rows = LocalOf(shown);
  CheckGradientShape(rows);
  at::Tensor kept = rows.to(at::kFloat).clone();
  if (ours) {
    PointGradient(kept.mutable_data_ptr());  // what autograd adds to it in place meanwhile stays, too
  } else {
    if (gradient_ && GradientIsHeldElsewhere()) {
      CopyGradientOut();  // the program's, which the job's new values are not to be seen in
    }
    DropCarry();  // of a backward that an exception ended
  }
  carry_ = std::move(kept);
  carried_from_job_ = at::Tensor();
  carries_all_ = false;
  return true;
}

void HeldShard::PointGradient(void* memory) {
  if (gradient_ && gradient_storage_->nbytes() > 0) {
    gradient_storage_->set_data_ptr_noswap(at::DataPtr(memory, local_.device()));
  }
}

void HeldShard::TakeLateGradient() {
  const at::Tensor& shown = sharded_tensor().grad();
  const bool ours = shown.defined() && IsOurs(shown);
  if (!shown.defined() && gradient_ && GradientIsHeldElsewhere()) {
    CopyGradientOut();
  }
  PointGradient(gradient_memory_);
  if (!shown.defined()) {  // set to None between micro-batches
    carry_ = carried_from_job_.defined() ? at::zeros_like(carried_from_job_) : at::Tensor();
  } else if (!ours) {
    const c10::AutoGradMode no_grad(false);
    const at::Tensor rows = LocalOf(shown);
    CheckGradientShape(rows);
    carry_ = rows.to(at::kFloat);
  }
}

void HeldShard::ShowGradient(int64_t steps) {
  if (shows_no_gradient()) {
    return;
  }
  if (std::exchange(carries_all_, false)) {
    carried_from_job_ = at::Tensor();
  }
  TakeLateGradient();
  if (!gradient_) {
    MakeGradient();
  }
  gradient_step_ = steps;
  for (const auto& [first, end] : padding_) {  // whatever the program has made of it
    TensorAt(static_cast<float*>(gradient_memory_) + first, {end - first}, at::kFloat, local_.device()).zero_();
  }
  AddCarry();
  Assign();
  RunHooks();
}

void HeldShard::RunHooks() {
  const auto* variable = reinterpret_cast<THPVariable*>(sharded_.ptr());
  if (variable->post_accumulate_grad_hooks != nullptr && variable->post_accumulate_grad_hooks != Py_None) {
    const py::dict hooks = py::reinterpret_borrow<py::dict>(variable->post_accumulate_grad_hooks);
    const py::list functions(py::reinterpret_steal<py::object>(PyMapping_Values(hooks.ptr())));
    for (const py::handle hook : functions) {
      hook(sharded_);
    }
  }
  RunOptimizersInBackward();
}

void HeldShard::RunOptimizersInBackward() {
  // What torch.distributed.optim._apply_optimizer_in_backward leaves on a parameter. Its own hook sees no gradient, as
  // autograd accumulates into another tensor.
  PyObject** attributes = _PyObject_GetDictPtr(sharded_.ptr());
  PyObject* given = attributes == nullptr || *attributes == nullptr
                        ? nullptr
                        : PyDict_GetItemString(*attributes, "_in_backward_optimizers");
  if (given == nullptr) {
    return;
  }
  const py::list optimizers(py::reinterpret_borrow<py::object>(given));
  for (const py::handle optimizer : optimizers) {
    optimizer.attr("step")();
    optimizer.attr("zero_grad")(py::arg("set_to_none") = true);
  }
}

void HeldShard::Assign() {
  if (gradient_dtype_ != at::kFloat) {
    const c10::AutoGradMode no_grad(false);
    const py::object cast = py::reinterpret_steal<py::object>(
        THPVariable_Wrap(THPVariable_Unpack(gradient_local_.ptr()).to(gradient_dtype_)));
    const py::object shown = make_gradient_.is_none() ? cast : make_gradient_(cast);
    sharded_tensor().mutable_grad() = THPVariable_Unpack(shown.ptr());
    return;
  }
  const at::Tensor& gradient = THPVariable_Unpack(gradient_.ptr());
  if (!sharded_tensor().grad().is_same(gradient)) {
    sharded_tensor().mutable_grad() = gradient;
  }
}

void HeldShard::TakeGradient(int64_t steps) {
  if (shows_no_gradient()) {
    return;
  }
  if (!gradient_) {
    MakeGradient();
  }
  DropCarry();
  PointGradient(gradient_memory_);
  gradient_step_ = steps;
  Assign();
}

bool HeldShard::GradientIsUnseen() const {
  return !carry_.defined() && !sharded_tensor().grad().defined() && (!gradient_ || !GradientIsHeldElsewhere());
}

at::Tensor HeldShard::gradient_shard() const {
  return TensorAt(gradient_memory_, local_.sizes(), at::kFloat, local_.device());
}

HeldShard::Shown HeldShard::SettleGradient(int64_t steps, bool stepping) {
  const at::Tensor& shown = sharded_tensor().grad();
  if (!shown.defined() || (stepping && !updated)) {
    return Shown::kNone;
  }
  const bool ours = IsOurs(shown);
  if (ours && gradient_step_ == steps) {
    TakeGradientFromJob();
    return Shown::kCurrent;
  }
  if ((!ours || carry_.defined()) && local_.numel() > 0) {  // the second: of a backward that an exception ended
    const c10::AutoGradMode no_grad(false);
    const at::Tensor rows = LocalOf(shown);
    CheckGradientShape(rows);
    if (!ours && gradient_ && GradientIsHeldElsewhere()) {
      CopyGradientOut();  // the program's, which is not to show what is written over it
    }
    gradient_shard().copy_(rows);
    PointGradient(gradient_memory_);
    DropCarry();
  }
  return Shown::kOther;  // also of an earlier step: the memory still has its values
}

}  // namespace shardd::python
