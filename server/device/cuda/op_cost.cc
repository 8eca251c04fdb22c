#include "server/device/cuda/op_cost.h"

#include <algorithm>
#include <limits>

#include "server/device/cuda/engine_internal.h"
#include "server/device/device_op.h"
#include "server/device/ops/rest_of_update.h"
#include "server/device/ops/slice.h"

namespace shardd {
namespace {

constexpr int64_t kKernelBytesPerNs = 1000;  // a GPU's memory, read and written
constexpr int64_t kCopyBytesPerNs = 25;      // PCIe, moved
constexpr int64_t kLaunchNs = 5000;
// Pieces begin at multiples of this many elements, and so are aligned as the operation is.
constexpr int64_t kPieceAlignment = 4096;

int64_t BytesPerNs(const DeviceOp& op) {
  return std::holds_alternative<CopyOp>(op) ? 2 * kCopyBytesPerNs : kKernelBytesPerNs;  // a copy's bytes count twice
}

}  // namespace

int64_t CudaOpCostNs(const DeviceOp& op, int64_t count) {
  if (std::holds_alternative<SumOp>(op) || std::holds_alternative<MoveOp>(op)) return 0;
  const int64_t update_ns = count * OpBytesOfOne(op) / BytesPerNs(op);
  // Old values are read and written once more, and each copy and word is a launch of its own.
  return LoggedOf(op) == nullptr ? kLaunchNs + update_ns : 4 * kLaunchNs + 2 * update_ns;
}

int64_t CudaOpPiece(const DeviceOp& op, int64_t turn_ns) {
  if (std::holds_alternative<SumOp>(op) || std::holds_alternative<MoveOp>(op)) {
    return std::numeric_limits<int64_t>::max();
  }
  if (std::holds_alternative<NormOp>(op)) return kCudaNormPieceNumel;
  const int64_t count = turn_ns * BytesPerNs(op) / OpBytesOfOne(op);
  return std::max(count / kPieceAlignment * kPieceAlignment, kPieceAlignment);
}

}  // namespace shardd
