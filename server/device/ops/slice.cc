#include "server/device/ops/slice.h"

#include <algorithm>

#include "server/device/device_op.h"

namespace shardd {
namespace {

constexpr int64_t kFloatBytes = sizeof(float);

struct BytesOfOne {
  int64_t operator()(const CopyOp&) const { return 2; }
  int64_t operator()(const ZeroOp&) const { return 1; }
  int64_t operator()(const CastOp& op) const { return DTypeSizeBytes(op.from) + DTypeSizeBytes(op.to); }
  int64_t operator()(const ReduceOp& op) const {
    return static_cast<int64_t>(op.sources.size()) * DTypeSizeBytes(op.source_dtype) + 2 * kFloatBytes;
  }
  int64_t operator()(const NormOp&) const { return kFloatBytes; }
  int64_t operator()(const AdamWOp& op) const { return 2 * DTypeSizeBytes(op.param_dtype) + 5 * kFloatBytes; }
  int64_t operator()(const SgdOp& op) const { return 2 * DTypeSizeBytes(op.param_dtype) + 3 * kFloatBytes; }
  int64_t operator()(const RuleOp& op) const {
    return 2 * DTypeSizeBytes(op.param_dtype) + (1 + 2 * UpdateRuleStates(op.params.rule)) * kFloatBytes;
  }
  int64_t operator()(const MuonOp& op) const {  // of one item, on the average
    const auto elements = static_cast<double>(op.matrix.rows) * static_cast<double>(op.matrix.cols);
    const double all = 40 * elements + MuonCost(op.matrix.rows, op.matrix.cols, op.matrix.params.ns_steps) / 2;
    return 1 + static_cast<int64_t>(all / static_cast<double>(std::max<int64_t>(1, op.items)));
  }
  int64_t operator()(const AdafactorOp& op) const {  // of one item, on the average
    return 1 + op.tensor.shape.numel() * (3 * kFloatBytes + 3 * DTypeSizeBytes(op.tensor.param_dtype)) /
                   std::max<int64_t>(1, op.items);
  }
  int64_t operator()(const SumOp&) const { return kFloatBytes; }
  int64_t operator()(const MoveOp&) const { return 1; }
};

// Moves the ranges of a copied operation to where the slice begins.
struct Slice {
  int64_t first;
  int64_t count;
  void operator()(CopyOp& op) const {
    op.src = static_cast<const char*>(op.src) + first;
    op.dst = static_cast<char*>(op.dst) + first;
    op.size_bytes = count;
  }
  void operator()(ZeroOp& op) const {
    op.dst = static_cast<char*>(op.dst) + first;
    op.size_bytes = count;
  }
  void operator()(CastOp& op) const {
    op.src = At(op.src, op.from, first);
    op.dst = At(op.dst, op.to, first);
    op.numel = count;
  }
  void operator()(ReduceOp& op) const {
    for (const void*& source : op.sources) source = At(source, op.source_dtype, first);
    op.dst += first;
    op.dst_file_offset_bytes += first * kFloatBytes;
    op.numel = count;
  }
  void operator()(NormOp& op) const {
    op.src += first;
    op.numel = count;
  }
  void operator()(AdamWOp& op) const {
    MoveArrays(op);
    op.m += first;
    op.v += first;
  }
  void operator()(SgdOp& op) const {
    MoveArrays(op);
    op.buf = At(op.buf, first);
  }
  void operator()(RuleOp& op) const {
    MoveArrays(op);
    op.a += first;
    op.b = At(op.b, first);
    op.c = At(op.c, first);
  }
  void operator()(MuonOp&) const {}
  void operator()(AdafactorOp&) const {}
  void operator()(SumOp&) const {}
  void operator()(MoveOp&) const {}

 private:
  // Of an update: all but its states.
  template <typename Op>
  void MoveArrays(Op& op) const {
    op.p = At(op.p, op.param_dtype, first);
    op.g += first;
    op.cast_dst = At(op.cast_dst, op.cast_dtype, first);
    op.numel = count;
    op.logged.first += first;
  }
};

}  // namespace

int64_t OpBytesOfOne(const DeviceOp& op) { return std::visit(BytesOfOne(), op); }

DeviceOp SliceOf(const DeviceOp& op, int64_t first, int64_t count) {
  DeviceOp slice = op;
  std::visit(Slice{first, count}, slice);
  return slice;
}

}  // namespace shardd
