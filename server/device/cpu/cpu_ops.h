#ifndef SHARDD_SERVER_DEVICE_CPU_CPU_OPS_H_
#define SHARDD_SERVER_DEVICE_CPU_CPU_OPS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "server/device/device_op.h"

namespace shardd {

// As CheckOp, and INTERNAL for operations that only other devices run.
absl::Status CheckCpuOp(const DeviceOp& op);

// Approximate bytes that one slice reads and writes: a millisecond, and large enough to stream past the caches.
inline constexpr int64_t kSliceBytes = int64_t{8} << 20;

// Approximate bytes that `count` units of `op` read and write.
int64_t CpuOpBytes(const DeviceOp& op, int64_t count);

// The most that one slice of `op` covers, in units of OpExtent. Norms are always cut at the same places: their pieces
// are added in order, so the result is always the same.
int64_t CpuOpSlice(const DeviceOp& op);

// Runs elements [first, first + count). REQUIRES: CheckCpuOp(op) is OK.
void RunCpuOp(const DeviceOp& op, int64_t first, int64_t count);

// Completes an operation of the update of `step` whose process was killed: what its log says is done is left alone.
// Operations that are no updates are run again as a whole. To be called for all operations of a rank, in their order.
// RESOURCE_EXHAUSTED: there is no memory to work in, and nothing has been changed.
absl::Status CompleteCpuOp(const DeviceOp& op, int64_t step);

}  // namespace shardd

#endif  // SHARDD_SERVER_DEVICE_CPU_CPU_OPS_H_
