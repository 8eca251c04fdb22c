#ifndef SHARDD_SERVER_DEVICE_OPS_SLICE_H_
#define SHARDD_SERVER_DEVICE_OPS_SLICE_H_

// Where element `first` of an operation's range lies. Null stays null: ranges that an operation does not have.

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
