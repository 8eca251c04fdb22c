#ifndef SHARDD_COMMON_TENSOR_DTYPE_H_
#define SHARDD_COMMON_TENSOR_DTYPE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "shardd/v1/model.pb.h"

namespace shardd {

// The proto's enum is the only dtype type.
using DType = v1::DType;

// Bytes per element; 0 for DTYPE_UNSPECIFIED or an unknown value.
int64_t DTypeSizeBytes(DType dtype);

// True for fp32, bf16, fp16, fp64.
bool IsFloatingPoint(DType dtype);

// True for what the daemon's optimizers can update and gradients can be rounded to: fp32, bf16, fp16. Gradients of fp64
// parameters are submitted in fp64, added in fp64 up to four ranks at a time, and stored in fp32 like all gradients.
bool IsTrainable(DType dtype);

// "float32", "bfloat16", ...; "unspecified".
absl::string_view DTypeName(DType dtype);
absl::StatusOr<DType> ParseDType(absl::string_view name);

}  // namespace shardd

#endif  // SHARDD_COMMON_TENSOR_DTYPE_H_
