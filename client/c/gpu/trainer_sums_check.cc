// What the daemon says is checked before the GPU is told: a record names memory by offsets, and those lie within what
// the plan has.

#include "absl/strings/str_cat.h"
#include "client/c/gpu/trainer_sums.h"
#include "common/tensor/dtype.h"

namespace shardd {
namespace {

bool IsKernelDType(int32_t dtype) {
  return dtype == cuda::kFloat32 || dtype == cuda::kBFloat16 || dtype == cuda::kFloat16;
}

bool Holds(int64_t begin, int64_t count, int64_t element_bytes, int64_t size_bytes) {
  return begin >= 0 && begin % element_bytes == 0 && begin <= size_bytes && count > 0 &&
         count <= (size_bytes - begin) / element_bytes;
}

}  // namespace

absl::Status CheckSumRecord(const SumRecord& record, const SumMemory& memory) {
  const auto refuse = [&](const auto&... fact) {
    return absl::InternalError(absl::StrCat("sums: record ", record.sequence, " of group ", record.group, ": ", fact...,
                                            " (rank=", memory.rank, ")"));
  };
  const auto dst_in = [&](int64_t element_bytes) {
    return Holds(record.dst_offset_bytes, record.numel, element_bytes, memory.gradients_bytes);
  };
  switch (record.kind) {
    case SumKind::kZero:
    case SumKind::kCopy:
      if (!dst_in(1) || (record.kind == SumKind::kCopy &&
                         !Holds(record.source_offset_bytes, record.numel, 1, memory.gradients_bytes))) {
        return refuse("lies outside of the gradient shards (got ", record.numel, " bytes from ",
                      record.source_offset_bytes, " to ", record.dst_offset_bytes, ", want them within ",
                      memory.gradients_bytes, ")");
      }
      return absl::OkStatus();
    case SumKind::kSum:
      break;
    default:
      return refuse("no such kind (got ", static_cast<uint32_t>(record.kind), ", want 1 to 3)");
  }
  if (!IsKernelDType(record.source_dtype) ||
      (record.reduce_dtype != cuda::kNoDType && !IsKernelDType(record.reduce_dtype)) ||
      (record.keep != cuda::kNoDType && !IsKernelDType(record.keep)) || record.accumulate > 1) {
    return refuse("no kernel does that (got dtypes ", record.source_dtype, ", ", record.reduce_dtype, ", ", record.keep,
                  ", accumulate ", record.accumulate, ", want float32, bfloat16 or float16, and 0 or 1)");
  }
  if (!dst_in(sizeof(float))) {
    return refuse("lies outside of the gradient shards (got ", record.numel, " elements at ", record.dst_offset_bytes,
                  ", want them within ", memory.gradients_bytes, " bytes)");
  }
  if (!Holds(record.source_offset_bytes, record.numel, DTypeSizeBytes(static_cast<DType>(record.source_dtype)),
             memory.slots_bytes)) {
    return refuse("lies outside of the gradient slots (got ", record.numel, " elements at ", record.source_offset_bytes,
                  ", want them within ", memory.slots_bytes, " bytes)");
  }
  bool any = false;
  for (int rank = 0; rank < kMaxSumRanks; ++rank) {
    const bool named = ((record.ranks[rank / 64] >> (rank % 64)) & 1) != 0;
    any = any || named;
    if (named && rank >= memory.world_size) {
      return refuse("no such rank (got ", rank, ", want 0 to ", memory.world_size - 1, ")");
    }
  }
  return any ? absl::OkStatus() : refuse("names no rank");
}

}  // namespace shardd
