#include "client/torch/parameter_storage.h"

#include <c10/core/GradMode.h>

#include <utility>

#include "client/torch/torch_versions.h"

namespace shardd {
namespace {

// Frees nothing: the memory is not ours. Its address marks the storages that are made here, for as long as they live.
void KeepMemory(void*) {}

at::DataPtr Marked(void* data, at::Device device) { return at::DataPtr(data, /*ctx=*/nullptr, &KeepMemory, device); }

}  // namespace

ParameterStorage::ParameterStorage(at::IntArrayRef shape, at::ScalarType dtype, std::string error, at::Device device)
    : shape_(shape.vec()), dtype_(dtype), error_(std::move(error)), device_(device) {
  size_t size_bytes = c10::elementSize(dtype);
  for (const int64_t extent : shape) {
    size_bytes *= static_cast<size_t>(extent);
  }
  // No allocator and not resizable: nothing can grow it away from the memory it shows.
  storage_ =
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), size_bytes, Marked(nullptr, device_),
                                            /*allocator=*/nullptr, /*resizable=*/false);
  Clear();
}

void ParameterStorage::Adopt(at::Tensor& tensor) {
  const c10::AutoGradMode no_grad(false);
  at::Tensor replacement = at::empty({0}, at::TensorOptions().dtype(dtype_).device(device_));
  auto* impl = replacement.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(c10::Storage(storage_));
  impl->set_sizes_contiguous(shape_);
  tensor.set_data(replacement);
}

bool ParameterStorage::IsAdopted(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.unsafeGetTensorImpl()
                                         ->unsafe_storage()
                                         .unsafeGetStorageImpl()
                                         ->_mutable_data_ptr_no_checks()
                                         .get_deleter() == &KeepMemory;
}

bool ParameterStorage::Holds(const at::Tensor& tensor) const {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() == storage_.get();
}

void ParameterStorage::PointTo(const void* data) {
  // Torch has no read-only storage; where the memory is mapped read-only a write into it is a fault.
  PointStorage(storage_.get(), Marked(const_cast<void*>(data), device_));
}

void ParameterStorage::Clear() {
  storage_->set_data_ptr_noswap(Marked(nullptr, device_));
  storage_->release_data_and_set_meta_custom_data_ptr_error_msg_(error_);
}

}  // namespace shardd
