#ifndef SHARDD_SERVER_DEVICE_CPU_CPU_OPS_H_
#define SHARDD_SERVER_DEVICE_CPU_CPU_OPS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "server/device/device.h"

namespace shardd {

// As CheckOp, and INTERNAL for what only other devices run.
absl::Status CheckCpuOp(const DeviceOp& op);

// What one slice of `op` covers at most, in the unit of OpExtent: large enough to stream past the caches, and for
// squared norms whole blocks, so that slicing is always the same and so is the result.
int64_t CpuOpSlice(const DeviceOp& op);

// Runs elements [first, first + count). REQUIRES: CheckCpuOp(op) is OK.
void RunCpuOp(const DeviceOp& op, int64_t first, int64_t count);

}  // namespace shardd

#endif  // SHARDD_SERVER_DEVICE_CPU_CPU_OPS_H_
