#ifndef SHARDD_SERVER_DEVICE_OPS_CHECK_H_
#define SHARDD_SERVER_DEVICE_OPS_CHECK_H_

#include <cstdint>

#include "absl/status/status.h"
#include "server/device/device_op.h"

namespace shardd {

// Elements of `op` (bytes for a copy, items for a matrix).
int64_t OpExtent(const DeviceOp& op);

// INTERNAL: an operation that no kernel accepts (dtype, null pointer, negative extent), a bug of the submitter.
absl::Status CheckOp(const DeviceOp& op);

}  // namespace shardd

#endif  // SHARDD_SERVER_DEVICE_OPS_CHECK_H_
