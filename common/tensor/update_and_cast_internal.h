#ifndef SHARDD_COMMON_TENSOR_UPDATE_AND_CAST_INTERNAL_H_
#define SHARDD_COMMON_TENSOR_UPDATE_AND_CAST_INTERNAL_H_

#include <cstdint>

#include "common/tensor/isa_internal.h"
#include "common/tensor/kernels.h"

namespace shardd::tensor {

// Runs update(first, count) and makes the cast copy of what it wrote while that is still in L1.
template <typename Update>
void UpdateAndCast(void* p, DType param_dtype, void* cast_dst, DType cast_dtype, int64_t numel, Update&& update) {
  if (cast_dst == nullptr) {
    update(int64_t{0}, numel);
    return;
  }
  const int64_t param_bytes = DTypeSizeBytes(param_dtype);
  const int64_t cast_bytes = DTypeSizeBytes(cast_dtype);
  const bool stream = numel * cast_bytes >= tensor::kStreamBytes;
  tensor::ForBlocks(cast_dst, numel, cast_bytes, stream, [&](int64_t first, int64_t count, void* out) {
    for (int64_t done = 0; done < count; done += tensor::kBlockNumel) {
      const int64_t n = count - done < tensor::kBlockNumel ? count - done : tensor::kBlockNumel;
      update(first + done, n);
      Cast(static_cast<char*>(p) + (first + done) * param_bytes, param_dtype,
           static_cast<char*>(out) + done * cast_bytes, cast_dtype, n);
    }
  });
}

}  // namespace shardd::tensor

#endif  // SHARDD_COMMON_TENSOR_UPDATE_AND_CAST_INTERNAL_H_
