#include "server/device/ops/check.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/tensor/float8_blocks.h"
#include "server/device/device.h"
#include "server/device/device_op.h"

namespace shardd {
namespace {

absl::Status Malformed(absl::string_view kind, absl::string_view fact) {
  return absl::InternalError(absl::StrCat(kind, ": ", fact));
}

absl::Status CheckUpdate(absl::string_view kind, bool null_pointer, DType param_dtype, const void* cast_dst,
                         DType cast_dtype) {
  if (null_pointer) return Malformed(kind, "null pointer");
  if (!IsTrainable(param_dtype)) {
    return Malformed(kind, absl::StrCat("parameter dtype is not trainable (got ", DTypeName(param_dtype), ")"));
  }
  if (cast_dst != nullptr && !IsFloatingPoint(cast_dtype)) {
    return Malformed(kind, absl::StrCat("cast dtype is not floating point (got ", DTypeName(cast_dtype), ")"));
  }
  return absl::OkStatus();
}

struct Check {
  absl::Status operator()(const CopyOp& op) const {
    return op.src == nullptr || op.dst == nullptr ? Malformed("copy", "null pointer") : absl::OkStatus();
  }
  absl::Status operator()(const ZeroOp& op) const {
    return op.dst == nullptr ? Malformed("zero", "null pointer") : absl::OkStatus();
  }
  absl::Status operator()(const CastOp& op) const {
    if (op.src == nullptr || op.dst == nullptr) return Malformed("cast", "null pointer");
    if (op.float8 && !(IsFloatingPoint(op.from) && HasFloat8Blocks(op.to))) {
      return Malformed("cast", absl::StrCat("float8 has no values for it (got ", DTypeName(op.from), " to ",
                                            DTypeName(op.to), ", want float32, bfloat16 or float16)"));
    }
    const bool same = op.from == op.to && DTypeSizeBytes(op.from) > 0;
    if (!same && !(IsFloatingPoint(op.from) && IsFloatingPoint(op.to))) {
      return Malformed("cast", absl::StrCat("no such cast (got ", DTypeName(op.from), " to ", DTypeName(op.to), ")"));
    }
    return absl::OkStatus();
  }
  absl::Status operator()(const ReduceOp& op) const {
    if (op.dst == nullptr || std::find(op.sources.begin(), op.sources.end(), nullptr) != op.sources.end()) {
      return Malformed("reduce", "null pointer");
    }
    if (op.sources.empty()) return Malformed("reduce", "no sources");
    if (!IsFloatingPoint(op.source_dtype)) {
      return Malformed("reduce",
                       absl::StrCat("source dtype is not floating point (got ", DTypeName(op.source_dtype), ")"));
    }
    if (op.reduce_dtype != v1::DTYPE_UNSPECIFIED && !IsTrainable(op.reduce_dtype)) {
      return Malformed("reduce", absl::StrCat("reduce dtype is not trainable (got ", DTypeName(op.reduce_dtype), ")"));
    }
    if (op.keep != v1::DTYPE_UNSPECIFIED && !IsTrainable(op.keep)) {
      return Malformed("reduce", absl::StrCat("no dtype to keep sums in (got ", DTypeName(op.keep), ")"));
    }
    return absl::OkStatus();
  }
  absl::Status operator()(const NormOp& op) const {
    return op.src == nullptr || op.result == nullptr ? Malformed("norm", "null pointer") : absl::OkStatus();
  }
  absl::Status operator()(const AdamWOp& op) const {
    const bool null_pointer = op.p == nullptr || op.g == nullptr || op.m == nullptr || op.v == nullptr;
    if (!null_pointer && op.params.step < 1) {
      return Malformed("adamw", absl::StrCat("step counts from 1 (got ", op.params.step, ")"));
    }
    return CheckUpdate("adamw", null_pointer, op.param_dtype, op.cast_dst, op.cast_dtype);
  }
  absl::Status operator()(const SgdOp& op) const {
    if ((op.buf == nullptr) != (op.params.momentum == 0)) {
      return Malformed("sgd", "momentum and its buffer do not go together");
    }
    return CheckUpdate("sgd", op.p == nullptr || op.g == nullptr, op.param_dtype, op.cast_dst, op.cast_dtype);
  }
  absl::Status operator()(const RuleOp& op) const {
    const char* const name = UpdateRuleName(op.params.rule);
    if ((op.b != nullptr) != (UpdateRuleStates(op.params.rule) >= 2)) {
      return Malformed(name, "the rule and its second state do not go together");
    }
    if ((op.c != nullptr) != (UpdateRuleStates(op.params.rule) == 3)) {
      return Malformed(name, "the rule and its third state do not go together");
    }
    const bool null_pointer = op.p == nullptr || op.g == nullptr || op.a == nullptr;
    if (!null_pointer && op.params.step < 1) {
      return Malformed(name, absl::StrCat("step counts from 1 (got ", op.params.step, ")"));
    }
    return CheckUpdate(name, null_pointer, op.param_dtype, op.cast_dst, op.cast_dtype);
  }
  absl::Status operator()(const MuonOp& op) const {
    const MuonMatrix& of = op.matrix;
    if (of.rows < 1 || of.cols < 1 || of.params.ns_steps < 0 || of.params.ns_steps > kMaxNewtonSchulzSteps ||
        op.items != MuonItems(of.rows, of.cols, of.params.ns_steps)) {
      return Malformed("muon", absl::StrCat("no such matrix, or items of another one (got ", of.rows, " x ", of.cols,
                                            ", ", of.params.ns_steps, " steps, ", op.items, " items)"));
    }
    return CheckUpdate("muon", of.p == nullptr || of.g == nullptr || of.buf == nullptr, of.param_dtype, of.cast_dst,
                       of.cast_dtype);
  }
  absl::Status operator()(const AdafactorOp& op) const {
    const AdafactorTensor& of = op.tensor;
    if (of.shape.matrices < 1 || of.shape.rows < 1 || of.shape.cols < 1 || of.params.step < 1 ||
        op.items != AdafactorItems(of.shape)) {
      return Malformed("adafactor", absl::StrCat("no such parameter, items of another one, or no such update (got ",
                                                 of.shape.matrices, " x ", of.shape.rows, " x ", of.shape.cols, ", ",
                                                 op.items, " items, update ", of.params.step, ")"));
    }
    const bool null_pointer = of.p == nullptr || of.g == nullptr || of.row == nullptr;
    return CheckUpdate("adafactor", null_pointer || (of.shape.is_factored && of.col == nullptr), of.param_dtype,
                       of.cast_dst, of.cast_dtype);
  }
  absl::Status operator()(const SumOp& op) const {
    if (op.communicator == nullptr) return Malformed("sum", "no communicator");
    const int members = op.communicator->members();
    if (op.member < 0 || op.member >= members) {
      return Malformed("sum", absl::StrCat("no such member (got ", op.member, ", want 0 to ", members - 1, ")"));
    }
    int64_t numel = 0;
    for (const SumPart& part : op.parts) {
      if ((part.root < 0 && part.root != kAllMembers) || part.root >= members) {
        return Malformed("sum", absl::StrCat("no such root (got ", part.root, ", want 0 to ", members - 1, ")"));
      }
      const bool writes = part.root == op.member || part.root == kAllMembers;
      if (part.src == nullptr || (writes && part.dst == nullptr)) return Malformed("sum", "null pointer");
      if (part.numel < 1) return Malformed("sum", absl::StrCat("an empty part (got ", part.numel, ")"));
      numel += part.numel;
    }
    if (numel != op.numel)
      return Malformed("sum", absl::StrCat("parts make ", numel, " elements (want ", op.numel, ")"));
    if (!op.scatter) return absl::OkStatus();
    bool even = op.parts.size() == static_cast<size_t>(members);
    for (size_t i = 0; even && i < op.parts.size(); ++i) {
      const SumPart& part = op.parts[i];
      even = part.root == static_cast<int>(i) && part.numel == op.parts[0].numel &&
             part.src == op.parts[0].src + static_cast<int64_t>(i) * part.numel;
    }
    return even ? absl::OkStatus() : Malformed("sum", "parts that cannot be scattered");
  }
  absl::Status operator()(const MoveOp& op) const {
    if (op.communicator == nullptr) return Malformed("move", "no communicator");
    const int members = op.communicator->members();
    int64_t size_bytes = 0;
    for (const MoveOp::Move& move : op.moves) {
      if (move.peer < 0 || move.peer >= members || move.peer == op.member) {
        return Malformed("move", absl::StrCat("no such peer (got ", move.peer, ", want 0 to ", members - 1, " without ",
                                              op.member, ")"));
      }
      if ((move.src == nullptr) == (move.dst == nullptr) || move.size_bytes < 1) {
        return Malformed("move", absl::StrCat("neither sent nor received, or both (of ", move.size_bytes, " bytes)"));
      }
      size_bytes += move.size_bytes;
    }
    return size_bytes == op.size_bytes
               ? absl::OkStatus()
               : Malformed("move", absl::StrCat("moves make ", size_bytes, " bytes (want ", op.size_bytes, ")"));
  }
};

}  // namespace

int64_t OpExtent(const DeviceOp& op) {
  return std::visit(
      [](const auto& o) {
        if constexpr (requires { o.numel; }) {
          return o.numel;
        } else if constexpr (requires { o.items; }) {
          return o.items;
        } else {
          return o.size_bytes;
        }
      },
      op);
}

absl::Status CheckOp(const DeviceOp& op) {
  const int64_t extent = OpExtent(op);
  if (extent < 0) return Malformed("operation", absl::StrCat("negative extent (got ", extent, ")"));
  if (extent == 0) return absl::OkStatus();
  return std::visit(Check{}, op);
}

}  // namespace shardd
