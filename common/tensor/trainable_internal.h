#ifndef SHARDD_COMMON_TENSOR_TRAINABLE_INTERNAL_H_
#define SHARDD_COMMON_TENSOR_TRAINABLE_INTERNAL_H_

#include "common/tensor/float_bits.h"
#include "common/tensor/isa_internal.h"
#include "common/tensor/kernels.h"

namespace shardd::tensor {

// Returns use(type) for the type of float_bits.h that stands for a trainable `dtype`. Any other is a broken contract of
// `kernel` (UnsupportedDType).
template <typename Use>
auto WithTrainable(DType dtype, const char* kernel, Use use) {
  switch (dtype) {
    case v1::DTYPE_FLOAT32:
      return use(Float32());
    case v1::DTYPE_BFLOAT16:
      return use(BFloat16());
    case v1::DTYPE_FLOAT16:
      return use(Float16());
    default:
      UnsupportedDType(kernel, dtype);
  }
}

}  // namespace shardd::tensor

#endif  // SHARDD_COMMON_TENSOR_TRAINABLE_INTERNAL_H_
