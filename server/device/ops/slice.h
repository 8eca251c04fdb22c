#ifndef SHARDD_SERVER_DEVICE_OPS_SLICE_H_
#define SHARDD_SERVER_DEVICE_OPS_SLICE_H_

// Address of element `first` of an operation's range. Null stays null, for ranges that an operation lacks.

#include <cstdint>

#include "common/tensor/dtype.h"

namespace shardd {

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
