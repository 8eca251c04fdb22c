#ifndef SHARDD_CLIENT_TORCH_PARAMETER_STORAGE_H_
#define SHARDD_CLIENT_TORCH_PARAMETER_STORAGE_H_

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <vector>

namespace shardd {

// The storage of one parameter: its own, exactly its size, over memory that this library does not own. Tensors that
// share a storage share a version counter and are saved and copied together, so no two parameters share one. Swapping
// the data pointer makes every view right again, also those that autograd saved in forward.
// Thread-compatible.
class ParameterStorage {
 public:
  // Holds nothing at first: any use of its tensors raises `error`.
  ParameterStorage(at::IntArrayRef shape, at::ScalarType dtype, std::string error, at::Device device = at::kCPU);

  // Makes the leaf `tensor` a contiguous tensor over this storage, in this dtype. The tensor object stays the same, so
  // every reference to it follows; what it held before is dropped.
  void Adopt(at::Tensor& tensor);
  // Whether `tensor` lies in the storage of some ParameterStorage of this library, also of one that is gone: it
  // belongs, or belonged, to a sharded module. Never reads it.
  static bool IsAdopted(const at::Tensor& tensor);
  // Whether `tensor` still lies in this storage.
  bool Holds(const at::Tensor& tensor) const;

  // The elements are at `data`, numel of them, which `device` may read until Clear() or the next PointTo().
  void PointTo(const void* data);
  // From here on any use raises the error given at construction; old bytes are never read.
  void Clear();

  at::ScalarType dtype() const { return dtype_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  at::Device device() const { return device_; }

 private:
  const std::vector<int64_t> shape_;
  const at::ScalarType dtype_;
  const std::string error_;
  const at::Device device_;
  c10::intrusive_ptr<c10::StorageImpl> storage_;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_TORCH_PARAMETER_STORAGE_H_
