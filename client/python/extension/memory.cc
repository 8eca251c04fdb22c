#include "client/python/extension/memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <string.h>

namespace shardd::python {

at::Tensor TensorAt(void* data, at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  // With the device named, torch does not ask the driver whose the pointer is.
  return at::for_blob(data, sizes)
      .options(at::TensorOptions().dtype(dtype).device(device))
      .target_device(device)
      .make_tensor();
}

c10::DataPtr Allocate(size_t size_bytes, at::Device device) {
  if (device.is_cpu()) {
    return c10::GetCPUAllocator()->allocate(size_bytes);
  }
  const c10::DeviceGuard guard(device);
  return c10::GetAllocator(device.type())->allocate(size_bytes);
}

void CopyBytes(void* to, const void* from, size_t size_bytes, at::Device device) {
  if (size_bytes == 0) {
    return;
  }
  if (device.is_cpu()) {
    memcpy(to, from, size_bytes);
    return;
  }
  const auto numel = static_cast<int64_t>(size_bytes);
  TensorAt(to, {numel}, at::kByte, device).copy_(TensorAt(const_cast<void*>(from), {numel}, at::kByte, device));
}

}  // namespace shardd::python
