#include "client/python/extension/managed_param.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "client/python/extension/errors.h"
#include "client/python/extension/memory.h"
#include "client/python/extension/tensors.h"

namespace shardd::python {
namespace {

std::string ShardedMessage(const std::string& fqn) {
  return "use of parameter \"" + fqn +
         "\": its group is resharded; use it inside the forward or backward of its fully sharded module, or call "
         "unshard() on that module";
}

at::Tensor LocalTensor(const py::object& unsharded, bool is_dtensor) {
  return THPVariable_Unpack(is_dtensor ? py::object(unsharded.attr("_local_tensor")).ptr() : unsharded.ptr());
}

}  // namespace

void RaiseNotSynchronised(const std::string& fqn) {
  Check(Status(Code::kFailedPrecondition,
               "step: the gradient of \"" + fqn +
                   "\" is not synchronised; run the last backward outside of no_sync(), or with "
                   "set_requires_gradient_sync(True) and, on a 2-D mesh, set_requires_all_reduce(True)"));
}

bool IsParameter(PyObject* object) {
  return object != nullptr && THPVariable_Check(object) && PyObject_IsInstance(object, ParameterClass) == 1;
}

void Place::Put(py::handle param) const {
  if (module.is_none()) {
    if (PyDict_SetItem(parameters.ptr(), name.ptr(), param.ptr()) != 0) {
      throw py::error_already_set();
    }
  } else if (py::object owner = module(); !owner.is_none()) {
    py::setattr(owner, name, param);
  }
}

ManagedParam::ManagedParam(Options options, std::shared_ptr<HeldShard> shard, py::object unsharded,
                           py::object local_gradient)
    : fqn(options.fqn),
      daemon_param(options.daemon_param),
      unit_group(options.unit_group),
      index_in_group(options.index_in_group),
      trainable(options.trainable),
      mesh_scale(options.mesh_scale),
      shard_(std::move(shard)),
      unsharded_(std::move(unsharded)),
      unsharded_tensor_(THPVariable_Unpack(unsharded_.ptr())),
      local_(LocalTensor(unsharded_, !local_gradient.is_none())),
      local_gradient_(std::move(local_gradient)),
      order_(local_.sizes(), options.shard_dim, options.shard_parts, options.rows),
      own_first_(options.own_first),
      shows_unsharded_(options.shows_unsharded),
      gathers_itself_(options.gathers_itself),
      storage_(local_.sizes(), local_.scalar_type(), ShardedMessage(options.fqn), local_.device()) {
  at::Tensor tensor = local_;
  storage_.Adopt(tensor);
}

bool ManagedParam::Register(const std::vector<Place>& places, bool unsharded) {
  bool as_left = true;
  PyObject* sharded = shard_->sharded().ptr();
  PyObject* param = unsharded ? unsharded_.ptr() : sharded;
  for (const Place& place : places) {
    if (place.module.is_none()) {
      PyObject* current = place.current();
      if (current == param) {
        continue;
      }
      if (current != sharded && current != unsharded_.ptr() && current != nullptr) {
        if (!shard_->is_plain() || !IsParameter(current)) {
          Check(Status(Code::kFailedPrecondition,
                       "unshard parameter \"" + fqn +
                           "\": another object was assigned to its module after the model was registered; copy values "
                           "into the parameter instead (load_state_dict without assign=True does)"));
        }
        as_left = false;
      }
    }
    place.Put(param);
  }
  if (!unsharded && shard_->is_plain() && !storage_.Holds(local_)) {
    at::Tensor tensor = local_;
    storage_.Adopt(tensor);
    as_left = false;
  }
  if (unsharded && unsharded_tensor_.requires_grad() != requires_grad()) {
    if (requires_grad() && !trainable) {
      if (!c10::GradMode::is_enabled()) {
        return as_left;  // the next forward that has a backward sees to it
      }
      Check(
          Status(Code::kFailedPrecondition,
                 "unshard parameter \"" + fqn +
                     "\": it was unfrozen, and the job trains it from the next forward of the model on; call unshard() "
                     "after that"));
    }
    at::Tensor tensor = unsharded_tensor_;
    tensor.set_requires_grad(requires_grad());
  }
  return as_left;
}

bool ManagedParam::RestoreUnsharded(const std::vector<Place>& places) {
  bool as_left = true;
  if (!shard_->is_plain()) {
    return as_left;
  }
  for (const Place& place : places) {
    if (PyObject* current = place.current(); current != unsharded_.ptr() && IsParameter(current)) {
      place.Put(unsharded_);
      as_left = false;
    }
  }
  if (!storage_.Holds(local_)) {
    at::Tensor tensor = local_;
    storage_.Adopt(tensor);
    as_left = false;
  }
  return as_left;
}

void ManagedParam::PointUnsharded(const void* data) {
  if (gathers_itself_) {
    // It has memory of its own, which whoever gathered it fills and frees.
  } else if (order_.is_parameters()) {
    storage_.PointTo(data);
  } else if (users_ == 0) {
    copy_ = Allocate(local_.nbytes(), storage_.device());
    {
      const NoGil no_gil;
      order_.ToParameter(data, copy_.get(), local_.numel(), storage_.dtype(), storage_.device());
    }
    storage_.PointTo(copy_.get());
    copy_version_ = local_._version();
  }
  ++users_;
}

void ManagedParam::SetUnsharded(py::object unsharded) {
  unsharded_ = std::move(unsharded);
  unsharded_tensor_ = THPVariable_Unpack(unsharded_.ptr());
}

void ManagedParam::ClearUnsharded() {
  if (--users_ == 0) {
    written_ = written_ || (copy_ && local_._version() != copy_version_);
    storage_.Clear();
    copy_.clear();
  }
}

bool ManagedParam::TakeWritten() { return std::exchange(written_, false); }

void ManagedParam::CopyOut(const void* in_job, at::Device device, at::Tensor& out) const {
  if (out.device() != device) {
    at::Tensor there = at::empty(out.sizes(), out.options().device(device));
    CopyOut(in_job, device, there);
    out.copy_(there);
  } else if (order_.is_parameters()) {
    CopyBytes(out.mutable_data_ptr(), in_job, out.nbytes(), device);
  } else {
    order_.ToParameter(in_job, out.mutable_data_ptr(), out.numel(), out.scalar_type(), device);
  }
}

void ManagedParam::Forget() {
  slot_ = at::Tensor();
  written_ = pending = in_job = left_in_job = contributed = false;
}

void ManagedParam::DropOwnGradient() {
  HideOwnGradient();
  shard_->DropOwnGradient();
}

void ManagedParam::LoseMemory() {
  const std::string message =
      "use of parameter \"" + fqn +
      "\": its memory is the job's, which a forked process does not have; pass it what it needs "
      "as ordinary tensors, made before the fork";
  shard_->LoseMemory(message);
  LoseStorage(StorageOf(local_), message);
  slot_ = at::Tensor();
}

void ManagedParam::SetGradientSlot(void* slot) {
  if (slot != nullptr && order_.is_some_rows()) {
    slot_ = TensorAt(slot, {order_.job_numel()}, storage_.dtype(), storage_.device());
  } else if (slot != nullptr) {
    slot_ = order_.is_parameters() ? TensorAt(slot, storage_.shape(), storage_.dtype(), storage_.device())
                                   : order_.SplitOfJob(slot, storage_.dtype(), storage_.device());
  }
}

void ManagedParam::WriteGradient(const at::Tensor& gradient, double scale, bool add) {
  const c10::AutoGradMode no_grad(false);
  at::Tensor dense = gradient.layout() == at::kStrided ? gradient : gradient.to_dense();
  if (order_.is_some_rows()) {
    WriteRows(dense, scale, add);
    return;
  }
  if (!order_.is_parameters()) {
    dense = order_.Split(dense);
  }
  if (add) {
    slot_.add_(dense, scale);
  } else if (scale != 1) {
    at::mul_out(slot_, dense, at::scalar_tensor(scale, at::TensorOptions().dtype(at::kDouble)));
  } else if (order_.is_parameters() && slot_.is_cpu() && dense.scalar_type() == slot_.scalar_type() &&
             dense.is_contiguous() && dense.sizes() == slot_.sizes()) {
    CopyBytes(slot_.mutable_data_ptr(), dense.const_data_ptr(), slot_.nbytes(), at::kCPU);
  } else {
    slot_.copy_(dense);
  }
}

void ManagedParam::WriteRows(const at::Tensor& dense, double scale, bool add) {
  if (!add) {
    slot_.zero_();  // what the other ranks' parameters, which this one does not know, get from it, and padding
  }
  for (const auto& [row, part] : order_.Shards(slot_, dense)) {
    row.add_(part, scale);
  }
}

at::Tensor ManagedParam::LocalGradient(const at::Tensor& gradient) const {
  if (local_gradient_.ptr() == Py_None || !gradient.unsafeGetTensorImpl()->is_python_dispatch()) {
    return gradient;
  }
  const py::gil_scoped_acquire gil;
  const py::object wrapped = py::reinterpret_steal<py::object>(THPVariable_Wrap(gradient));
  return THPVariable_Unpack(local_gradient_(wrapped).ptr());
}

at::Tensor ManagedParam::ZeroGradient() const { return at::zeros({}, slot_.options()).expand(storage_.shape()); }

void ManagedParam::AddOwnGradient(const at::Tensor& gradient) {
  const c10::AutoGradMode no_grad(false);
  const at::TensorOptions options = at::TensorOptions().dtype(storage_.dtype()).device(storage_.device());
  shard_->OwnGradient(own_first_, storage_.shape(), options).add_(gradient);
}

void ManagedParam::WriteOwnGradient(double scale) {
  if (const at::Tensor own = shard_->FindOwnGradient(own_first_, storage_.shape()); own.defined()) {
    WriteGradient(own, scale, /*add=*/true);
  }
}

void ManagedParam::InstallAccumulator(NodePtr node) {
  node->add_input_metadata(unsharded_tensor_);
  SetGradAccumulator(unsharded_tensor_, node);
  accumulator_ = std::move(node);
}

void ManagedParam::TakeGradient(int64_t steps) {
  if (trainable) {
    pending = false;
    in_job = true;
    left_in_job = false;
    shard_->TakeGradient(steps);
  }
}

ManagedParam::Presence ManagedParam::SettleGradient(HeldShard::Shown shown, bool stepping) {
  if (shown == HeldShard::Shown::kNone) {
    if (pending && !stepping) {
      return Presence::kAsIs;  // the program has not been shown it yet
    }
    if (pending && shard_->updated) {
      RaiseNotSynchronised(fqn);
    }
    const bool left = !stepping && std::exchange(left_in_job, false);
    return std::exchange(in_job, false) || left ? Presence::kDropped : Presence::kAsIs;
  }
  if (shown == HeldShard::Shown::kCurrent && in_job) {
    return Presence::kAsIs;
  }
  in_job = true;
  left_in_job = false;
  return Presence::kGiven;
}

}  // namespace shardd::python
