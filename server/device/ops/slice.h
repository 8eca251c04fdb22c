#ifndef SHARDD_SERVER_DEVICE_OPS_SLICE_H_
#define SHARDD_SERVER_DEVICE_OPS_SLICE_H_

// Parts of operations.

#include <cstdint>

#include "common/tensor/dtype.h"
#include "server/device/device_op.h"

namespace shardd {

// Bytes read and written for each unit of an operation's extent (OpExtent).
int64_t OpBytesOfOne(const DeviceOp& op);

// The operation on units [first, first + count) of its extent. REQUIRES: it is no sum over devices, and no matrix.
DeviceOp SliceOf(const DeviceOp& op, int64_t first, int64_t count);

// Address of element `first` of an operation's range. Null stays null, for ranges that an operation lacks.
template <typename T>
T* At(T* base, int64_t first) {
  return base == nullptr ? nullptr : base + first;
}
inline const void* At(const void* base, DType dtype, int64_t first) {
  return base == nullptr ? nullptr : static_cast<const char*>(base) + first * DTypeSizeBytes(dtype);
}
inline void* At(void* base, DType dtype, int64_t first) {
  return base == nullptr ? nullptr : static_cast<char*>(base) + first * DTypeSizeBytes(dtype);
}

}  // namespace shardd

#endif  // SHARDD_SERVER_DEVICE_OPS_SLICE_H_
