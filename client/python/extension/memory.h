#ifndef SHARDD_CLIENT_PYTHON_EXTENSION_MEMORY_H_
#define SHARDD_CLIENT_PYTHON_EXTENSION_MEMORY_H_

// Memory of the device that tensors are on. On a GPU nothing here waits: it is done in the order of the current stream.

#include <ATen/ATen.h>

#include <cstddef>

namespace shardd::python {

// A tensor over memory that is not torch's.
at::Tensor TensorAt(void* data, at::IntArrayRef sizes, at::ScalarType dtype, at::Device device);

// From the device's allocator.
c10::DataPtr Allocate(size_t size_bytes, at::Device device);

// Both on `device`.
void CopyBytes(void* to, const void* from, size_t size_bytes, at::Device device);

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_EXTENSION_MEMORY_H_
