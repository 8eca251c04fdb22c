#include "common/tensor/dtype.h"

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace shardd {
namespace {

struct DTypeRow {
  DType dtype;
  absl::string_view name;
  int64_t size_bytes;
};

// The names are PyTorch's without "torch.".
constexpr DTypeRow kDTypes[] = {
    {v1::DTYPE_FLOAT32, "float32", 4}, {v1::DTYPE_BFLOAT16, "bfloat16", 2}, {v1::DTYPE_FLOAT16, "float16", 2},
    {v1::DTYPE_FLOAT64, "float64", 8}, {v1::DTYPE_INT64, "int64", 8},       {v1::DTYPE_INT32, "int32", 4},
    {v1::DTYPE_INT16, "int16", 2},     {v1::DTYPE_INT8, "int8", 1},         {v1::DTYPE_UINT8, "uint8", 1},
    {v1::DTYPE_BOOL, "bool", 1},
};

const DTypeRow* Find(DType dtype) {
  for (const DTypeRow& row : kDTypes) {
    if (row.dtype == dtype) return &row;
  }
  return nullptr;
}

}  // namespace

int64_t DTypeSizeBytes(DType dtype) {
  const DTypeRow* row = Find(dtype);
  return row == nullptr ? 0 : row->size_bytes;
}

bool IsTrainable(DType dtype) {
  return dtype == v1::DTYPE_FLOAT32 || dtype == v1::DTYPE_BFLOAT16 || dtype == v1::DTYPE_FLOAT16;
}

bool IsFloatingPoint(DType dtype) { return IsTrainable(dtype) || dtype == v1::DTYPE_FLOAT64; }

absl::string_view DTypeName(DType dtype) {
  const DTypeRow* row = Find(dtype);
  return row == nullptr ? absl::string_view("unspecified") : row->name;
}

absl::StatusOr<DType> ParseDType(absl::string_view name) {
  std::string known;
  for (const DTypeRow& row : kDTypes) {
    if (row.name == name) return row.dtype;
    absl::StrAppend(&known, known.empty() ? "" : ", ", row.name);
  }
  return absl::InvalidArgumentError(absl::StrCat("parse dtype: unknown name (got \"", name, "\", want ", known, ")"));
}

}  // namespace shardd
