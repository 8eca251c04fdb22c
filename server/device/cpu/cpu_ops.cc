#include "server/device/cpu/cpu_ops.h"

#include <cstring>
#include <vector>

#include "server/device/ops/check.h"

namespace shardd {
namespace {

// Of a copy in bytes, else in elements.
constexpr int64_t kSliceBytes = int64_t{8} << 20;
constexpr int64_t kSliceNumel = int64_t{1} << 20;

template <typename T>
T* At(T* base, int64_t first) {
  return base == nullptr ? nullptr : base + first;
}
const void* At(const void* base, DType dtype, int64_t first) {
  return static_cast<const char*>(base) + first * DTypeSizeBytes(dtype);
}
void* At(void* base, DType dtype, int64_t first) {
  return base == nullptr ? nullptr : static_cast<char*>(base) + first * DTypeSizeBytes(dtype);
}

struct Slice {
  int64_t first;
  int64_t count;
  void operator()(const CopyOp& op) const {
    CopyBytes(static_cast<const char*>(op.src) + first, static_cast<char*>(op.dst) + first, count);
  }
  void operator()(const ZeroOp& op) const { std::memset(static_cast<char*>(op.dst) + first, 0, count); }
  void operator()(const CastOp& op) const {
    Cast(At(op.src, op.from, first), op.from, At(op.dst, op.to, first), op.to, count);
  }
  void operator()(const ReduceOp& op) const {
    if (first == 0) {
      Reduce(op, op.sources);
      return;
    }
    std::vector<const void*> sources;
    sources.reserve(op.sources.size());
    for (const void* source : op.sources) sources.push_back(At(source, op.source_dtype, first));
    Reduce(op, sources);
  }
  void Reduce(const ReduceOp& op, const std::vector<const void*>& sources) const {
    ReduceSources(sources, op.source_dtype, op.reduce_dtype, op.keep, op.scale, op.accumulate, op.dst + first, count);
  }
  void operator()(const NormOp& op) const { op.result->Add(op.src + first, count); }
  void operator()(const AdamWOp& op) const {
    AdamWUpdate(op.params, At(op.p, op.param_dtype, first), op.param_dtype, op.g + first, op.m + first, op.v + first,
                At(op.cast_dst, op.cast_dtype, first), op.cast_dtype, count);
  }
  void operator()(const SgdOp& op) const {
    SgdUpdate(op.params, At(op.p, op.param_dtype, first), op.param_dtype, op.g + first, At(op.buf, first),
              At(op.cast_dst, op.cast_dtype, first), op.cast_dtype, count);
  }
  void operator()(const SumOp&) const {}  // CheckCpuOp refuses it
};

}  // namespace

absl::Status CheckCpuOp(const DeviceOp& op) {
  if (std::holds_alternative<SumOp>(op)) return absl::InternalError("sum: no communicator reaches the host's memory");
  return CheckOp(op);
}

int64_t CpuOpSlice(const DeviceOp& op) {
  return std::holds_alternative<CopyOp>(op) || std::holds_alternative<ZeroOp>(op) ? kSliceBytes : kSliceNumel;
}

void RunCpuOp(const DeviceOp& op, int64_t first, int64_t count) { std::visit(Slice{first, count}, op); }

}  // namespace shardd
