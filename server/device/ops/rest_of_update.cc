#include "server/device/ops/rest_of_update.h"

#include <algorithm>
#include <type_traits>
#include <variant>

#include "server/device/ops/check.h"
#include "server/device/ops/slice.h"

namespace shardd {
namespace {

constexpr auto kStateBytes = static_cast<int64_t>(sizeof(float));

template <typename Op>
constexpr bool IsUpdate() {
  return std::is_same_v<Op, AdamWOp> || std::is_same_v<Op, SgdOp> || std::is_same_v<Op, RuleOp> ||
         std::is_same_v<Op, MuonOp> || std::is_same_v<Op, AdafactorOp>;
}

}  // namespace

UpdatedArrays UpdatedArraysOf(const AdamWOp& op, int64_t first, int64_t numel) {
  return {{{At(op.p, op.param_dtype, first), numel * DTypeSizeBytes(op.param_dtype)},
           {op.m + first, numel * kStateBytes},
           {op.v + first, numel * kStateBytes},
           {}}};
}

UpdatedArrays UpdatedArraysOf(const SgdOp& op, int64_t first, int64_t numel) {
  return {{{At(op.p, op.param_dtype, first), numel * DTypeSizeBytes(op.param_dtype)},
           {At(op.buf, first), numel * kStateBytes},
           {},
           {}}};
}

UpdatedArrays UpdatedArraysOf(const RuleOp& op, int64_t first, int64_t numel) {
  return {{{At(op.p, op.param_dtype, first), numel * DTypeSizeBytes(op.param_dtype)},
           {op.a + first, numel * kStateBytes},
           {At(op.b, first), numel * kStateBytes},
           {At(op.c, first), numel * kStateBytes}}};
}

UpdatedArrays UpdatedArraysOf(const MuonOp& op, int64_t first, int64_t numel) {
  const MuonMatrix& of = op.matrix;
  const int64_t of_buf = of.rows * of.cols;
  if (first < of_buf) return {{{}, {of.buf + first, numel * kStateBytes}, {}, {}}};
  return {{{At(of.p, of.param_dtype, first - of_buf), numel * DTypeSizeBytes(of.param_dtype)}, {}, {}, {}}};
}

UpdatedArrays UpdatedArraysOf(const AdafactorOp& op, int64_t first, int64_t numel) {
  const AdafactorTensor& of = op.tensor;
  const int64_t rows = of.shape.row_numel(), states = rows + of.shape.col_numel();
  if (first < rows) return {{{}, {of.row + first, numel * kStateBytes}, {}, {}}};
  if (first < states) return {{{}, {}, {of.col + first - rows, numel * kStateBytes}, {}}};
  return {{{At(of.p, of.param_dtype, first - states), numel * DTypeSizeBytes(of.param_dtype)}, {}, {}, {}}};
}

Logged* MutableLoggedOf(DeviceOp* op) {
  return std::visit(
      [](auto& any) -> Logged* {
        if constexpr (IsUpdate<std::decay_t<decltype(any)>>()) {
          return &any.logged;
        } else {
          return nullptr;
        }
      },
      *op);
}

const Logged* LoggedOf(const DeviceOp& op) {
  const Logged* const logged = MutableLoggedOf(const_cast<DeviceOp*>(&op));
  return logged == nullptr || logged->log == nullptr ? nullptr : logged;
}

std::vector<UpdateLog::Array> WrittenBy(const DeviceOp& op) {
  return std::visit(
      [](const auto& any) -> std::vector<UpdateLog::Array> {
        using Op = std::decay_t<decltype(any)>;
        if constexpr (std::is_same_v<Op, MuonOp>) {
          const int64_t numel = any.matrix.rows * any.matrix.cols;
          return {{any.matrix.p, numel * DTypeSizeBytes(any.matrix.param_dtype)},
                  {any.matrix.buf, numel * kStateBytes}};
        } else if constexpr (std::is_same_v<Op, AdafactorOp>) {
          const AdafactorTensor& of = any.tensor;
          std::vector<UpdateLog::Array> written = {{of.p, of.shape.numel() * DTypeSizeBytes(of.param_dtype)},
                                                   {of.row, of.shape.row_numel() * kStateBytes}};
          if (of.shape.is_factored) written.push_back({of.col, of.shape.col_numel() * kStateBytes});
          return written;
        } else if constexpr (IsUpdate<Op>()) {
          const UpdatedArrays updated = UpdatedArraysOf(any, 0, any.numel);
          std::vector<UpdateLog::Array> written;
          for (const UpdateLog::Array& array : updated.arrays) {
            if (array.data != nullptr) written.push_back(array);
          }
          return written;
        } else if constexpr (std::is_same_v<Op, CopyOp>) {
          return {{any.dst, any.size_bytes}};
        } else {
          return {};
        }
      },
      op);
}

RestOfUpdate RestOf(const std::vector<DeviceOp>& ops, int64_t step) {
  RestOfUpdate rest;
  for (const DeviceOp& op : ops) {
    const Logged* const logged = LoggedOf(op);
    if (logged == nullptr) {
      rest.ops.push_back(op);
      continue;
    }
    const UpdateLog& log = *logged->log;
    const int64_t numel = OpExtent(op);
    const int64_t done = log.done(step);
    const int64_t first = std::clamp<int64_t>(done - logged->first, 0, numel);
    if (first == numel) continue;
    if (log.is_torn(step) && done == logged->first + first) {
      const int64_t torn = std::min(log.block_numel(), numel - first);
      const UpdatedArrays updated = std::visit(
          [&](const auto& any) {
            if constexpr (IsUpdate<std::decay_t<decltype(any)>>()) {
              return UpdatedArraysOf(any, first, torn);
            } else {
              return UpdatedArrays{};
            }
          },
          op);
      for (int i = 0; i < UpdateLog::kArrays; ++i) {
        const UpdateLog::Array& array = updated.arrays[i];
        if (array.data == nullptr) continue;
        rest.put_back.push_back(CopyOp{OldValues(logged->place, i), array.data, array.size_bytes});
      }
    }
    rest.ops.push_back(first == 0 ? op : SliceOf(op, first, numel - first));
  }
  return rest;
}

}  // namespace shardd
