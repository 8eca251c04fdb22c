#include "client/python/extension/managed_param.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/GradMode.h>
#include <string.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "client/python/extension/errors.h"

namespace shardd::python {
namespace {

std::string ShardedMessage(const std::string& fqn) {
  return "use of parameter \"" + fqn +
         "\": its group is resharded; use it inside the forward or backward of its fully sharded module, or call "
         "unshard() on that module";
}

c10::StorageImpl* StorageOf(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// Any later use of the storage's tensors raises `message`.
void Lose(c10::StorageImpl* storage, const std::string& message) {
  storage->set_data_ptr_noswap(at::DataPtr(nullptr, at::kCPU));
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

// Moves the storage's bytes into memory of its own.
void CopyOut(c10::StorageImpl* storage) {
  const size_t size_bytes = storage->nbytes();
  c10::DataPtr copy = c10::GetCPUAllocator()->allocate(size_bytes);
  if (size_bytes > 0) {
    memcpy(copy.get(), storage->data(), size_bytes);
  }
  storage->set_data_ptr_noswap(std::move(copy));
}

}  // namespace

ManagedParam::ManagedParam(Options options, py::object sharded, at::Tensor local, py::object unsharded,
                           std::vector<Place> places, py::object make_gradient)
    : fqn(options.fqn),
      daemon_param(options.daemon_param),
      unit_group(options.unit_group),
      index_in_group(options.index_in_group),
      first_element(options.first_element),
      trainable(options.trainable),
      sharded_(std::move(sharded)),
      local_(std::move(local)),
      unsharded_(std::move(unsharded)),
      unsharded_tensor_(THPVariable_Unpack(unsharded_.ptr())),
      places_(std::move(places)),
      make_gradient_(std::move(make_gradient)),
      storage_(unsharded_tensor_.sizes(), unsharded_tensor_.scalar_type(), ShardedMessage(options.fqn)) {
  at::Tensor tensor = unsharded_tensor_;
  storage_.Adopt(tensor);
}

const at::Tensor& ManagedParam::sharded_tensor() const { return THPVariable_Unpack(sharded_.ptr()); }

void ManagedParam::Register(bool unsharded) {
  PyObject* param = unsharded ? unsharded_.ptr() : sharded_.ptr();
  for (const Place& place : places_) {
    if (place.module.is_none()) {
      PyObject* current = PyDict_GetItem(place.parameters.ptr(), place.name.ptr());
      if (current == param) {
        continue;
      }
      if (current != sharded_.ptr() && current != unsharded_.ptr()) {
        Check(Status(Code::kFailedPrecondition,
                     "unshard parameter \"" + fqn +
                         "\": another object was assigned to its module after the model was registered; copy values "
                         "into the parameter instead (load_state_dict without assign=True does)"));
      }
      if (PyDict_SetItem(place.parameters.ptr(), place.name.ptr(), param) != 0) {
        throw py::error_already_set();
      }
    } else if (py::object module = place.module(); !module.is_none()) {
      py::setattr(module, place.name, py::handle(param));
    }
  }
  if (unsharded && unsharded_tensor_.requires_grad() != sharded_tensor().requires_grad()) {
    if (sharded_tensor().requires_grad() && !trainable) {
      Check(Status(Code::kFailedPrecondition,
                   "unshard parameter \"" + fqn +
                       "\": it was unfrozen outside of a forward, and the job does not train it yet; call unshard() "
                       "before, or after the next forward of the model"));
    }
    at::Tensor tensor = unsharded_tensor_;
    tensor.set_requires_grad(sharded_tensor().requires_grad());
  }
}

void ManagedParam::PointShard(const void* data) {
  if (local_.numel() == 0) {
    return;  // a rank without rows
  }
  const size_t size_bytes = local_.nbytes();
  c10::StorageImpl* storage = StorageOf(local_);
  storage->set_data_ptr_noswap(at::DataPtr(const_cast<void*>(data), at::kCPU));
  storage->clear_data_ptr_access_error_msg_();
  storage->set_nbytes(size_bytes);
  storage->set_resizable(false);
}

void ManagedParam::CopyShardOut() {
  if (local_.numel() > 0) {
    CopyOut(StorageOf(local_));
  }
}

void ManagedParam::CopyGradientOut() {
  if (gradient_ && gradient_storage_->nbytes() > 0) {
    CopyOut(gradient_storage_.get());
  }
  gradient_ = py::object();
  gradient_local_ = py::object();
  gradient_storage_.reset();
}

void ManagedParam::ForgetGradient() {
  CopyGradientOut();
  sharded_tensor().mutable_grad() = at::Tensor();
  ReleaseGradientMemory();
}

void ManagedParam::ReleaseGradientMemory() {
  slot_ = at::Tensor();
  gradient_memory_ = nullptr;
  carry_ = at::Tensor();
  in_slot = pending = in_job = contributed = false;
}

void ManagedParam::ForgetShard() {
  CopyGradientOut();
  ReleaseGradientMemory();
  accumulator_.reset();
  for (at::Tensor& state : states_) {
    if (state.defined() && state.numel() > 0) {
      CopyOut(StorageOf(state));
    }
  }
  states_.clear();
}

void ManagedParam::AdoptState(size_t index, const at::Tensor& local, void* rows, bool copy_in) {
  if (index >= states_.size()) {
    states_.resize(index + 1);
  }
  at::Tensor& state = states_[index];
  if (state.defined() && !state.is_same(local) && state.numel() > 0) {
    CopyOut(StorageOf(state));
  }
  state = local;
  if (copy_in && local.numel() > 0) {
    memcpy(rows, local.const_data_ptr(), local.nbytes());
  }
  PointState(index, rows);
}

void ManagedParam::PointState(size_t index, void* rows) {
  const at::Tensor& state = states_[index];
  if (state.defined() && state.numel() > 0) {
    StorageOf(state)->set_data_ptr_noswap(at::DataPtr(rows, at::kCPU));
    StorageOf(state)->set_resizable(false);
  }
}

void ManagedParam::LoseMemory() {
  const std::string message =
      "use of parameter \"" + fqn +
      "\": its memory is the job's, which a forked process does not have; pass it what it needs "
      "as ordinary tensors, made before the fork";
  if (local_.numel() > 0) {
    Lose(StorageOf(local_), message);
  }
  Lose(StorageOf(unsharded_tensor_), message);
  if (gradient_storage_ != nullptr) {
    Lose(gradient_storage_.get(), message);
  }
  for (const at::Tensor& state : states_) {
    if (state.defined() && state.numel() > 0) {
      Lose(StorageOf(state), message);
    }
  }
  slot_ = at::Tensor();
  gradient_memory_ = nullptr;
}

void ManagedParam::SetGradientMemory(void* slot, void* gradient_shard) {
  if (slot == nullptr) {
    return;
  }
  slot_ = at::from_blob(slot, storage_.shape(), at::TensorOptions().dtype(storage_.dtype()));
  gradient_memory_ = gradient_shard;
}

void ManagedParam::InstallAccumulator(c10::intrusive_ptr<torch::autograd::Node> node) {
  node->add_input_metadata(unsharded_tensor_);
  torch::autograd::impl::set_grad_accumulator(unsharded_tensor_, c10::weak_intrusive_ptr<torch::autograd::Node>(node));
  accumulator_ = std::move(node);
}

void ManagedParam::MakeGradient() {
  const c10::AutoGradMode no_grad(false);
  at::Tensor local = at::empty({0}, at::TensorOptions().dtype(at::kFloat));
  gradient_storage_ = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<size_t>(local_.numel()) * sizeof(float),
      at::DataPtr(gradient_memory_, at::kCPU), /*allocator=*/nullptr, /*resizable=*/false);
  local.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(gradient_storage_));
  local.unsafeGetTensorImpl()->set_sizes_contiguous(local_.sizes());
  gradient_local_ = py::reinterpret_steal<py::object>(THPVariable_Wrap(local));
  local = at::Tensor();
  gradient_ = make_gradient_(gradient_local_);
  gradient_references_ = Py_REFCNT(gradient_.ptr());
  local_references_ = Py_REFCNT(gradient_local_.ptr());
  storage_references_ = gradient_storage_.use_count();
}

bool ManagedParam::GradientIsHeldElsewhere() const {
  return Py_REFCNT(gradient_.ptr()) > gradient_references_ || Py_REFCNT(gradient_local_.ptr()) > local_references_ ||
         gradient_storage_.use_count() > storage_references_;
}

bool ManagedParam::BeginGradient(int64_t steps) {
  const at::Tensor& shown = sharded_tensor().grad();
  if (!shown.defined()) {
    if (pending) {
      return false;
    }
    if (gradient_) {
      const py::gil_scoped_acquire gil;
      if (GradientIsHeldElsewhere()) {
        CopyGradientOut();
      }
    }
    return true;
  }
  const py::gil_scoped_acquire gil;
  const bool ours = gradient_ && shown.is_same(THPVariable_Unpack(gradient_.ptr()));
  if (ours && gradient_step_ == steps) {
    return false;
  }
  // Shown before a step, or the user's own: the job will hold the new gradient alone, so this is added afterwards.
  const c10::AutoGradMode no_grad(false);
  const py::object grad = py::reinterpret_steal<py::object>(THPVariable_Wrap(shown));
  const py::object local = grad.attr("_local_tensor");
  carry_ = THPVariable_Unpack(local.ptr()).to(at::kFloat).clone();
  return true;
}

void ManagedParam::ShowGradient(int64_t steps) {
  pending = false;
  if (!gradient_) {
    MakeGradient();
  }
  gradient_step_ = steps;
  if (carry_.defined()) {
    const c10::AutoGradMode no_grad(false);
    at::Tensor local = THPVariable_Unpack(gradient_local_.ptr());
    local.add_(carry_);
    carry_ = at::Tensor();
  }
  const at::Tensor& gradient = THPVariable_Unpack(gradient_.ptr());
  if (!sharded_tensor().grad().is_same(gradient)) {
    sharded_tensor().mutable_grad() = gradient;
  }
  const auto* variable = reinterpret_cast<THPVariable*>(sharded_.ptr());
  if (variable->post_accumulate_grad_hooks == nullptr || variable->post_accumulate_grad_hooks == Py_None) {
    return;
  }
  const py::dict hooks = py::reinterpret_borrow<py::dict>(variable->post_accumulate_grad_hooks);
  const py::list functions(py::reinterpret_steal<py::object>(PyMapping_Values(hooks.ptr())));
  for (const py::handle hook : functions) {
    hook(sharded_);
  }
}

void ManagedParam::TakeGradient(int64_t steps) {
  if (!trainable) {
    return;
  }
  if (!gradient_) {
    MakeGradient();
  }
  pending = false;
  in_job = true;
  gradient_step_ = steps;
  sharded_tensor().mutable_grad() = THPVariable_Unpack(gradient_.ptr());
}

at::Tensor ManagedParam::gradient_shard() const {
  return at::from_blob(gradient_memory_, local_.sizes(), at::TensorOptions().dtype(at::kFloat));
}

ManagedParam::Presence ManagedParam::SettleGradient(int64_t steps, bool stepping) {
  const at::Tensor& shown = sharded_tensor().grad();
  if (!shown.defined() || (stepping && !updated)) {
    if (pending && !stepping) {
      return Presence::kAsIs;  // the program has not been shown it yet
    }
    if (pending && updated) {
      Check(Status(Code::kFailedPrecondition,
                   "step: the gradient of \"" + fqn +
                       "\" is not synchronised; run the last backward with set_requires_gradient_sync(True) and, on a "
                       "2-D mesh, set_requires_all_reduce(True)"));
    }
    return std::exchange(in_job, false) ? Presence::kDropped : Presence::kAsIs;
  }
  const bool ours = gradient_ && shown.is_same(THPVariable_Unpack(gradient_.ptr()));
  if (ours && in_job && gradient_step_ == steps) {
    return Presence::kAsIs;
  }
  if (!ours && local_.numel() > 0) {
    const c10::AutoGradMode no_grad(false);
    const py::object grad = py::reinterpret_steal<py::object>(THPVariable_Wrap(shown));
    const at::Tensor rows = THPVariable_Unpack(py::object(grad.attr("_local_tensor")).ptr());
    if (rows.sizes() != local_.sizes()) {
      Check(Status(Code::kInvalidArgument, "step: the gradient that was assigned to \"" + fqn +
                                               "\" has other rows than its parameter has on this rank"));
    }
    gradient_shard().copy_(rows);
  }
  in_job = true;
  return Presence::kGiven;  // also of an earlier step: the memory still has its values
}

}  // namespace shardd::python
