#ifndef SHARDD_SERVER_DEVICE_CUDA_OP_COST_H_
#define SHARDD_SERVER_DEVICE_CUDA_OP_COST_H_

// What operations take of a GPU, for turns of jobs: an upper estimate, from bytes alone. Nobody knows what a copy goes
// over before it has run, so it is taken for one over PCIe.

#include <cstdint>

#include "server/device/device_op.h"

namespace shardd {

// Of `count` units of its extent. A sum over devices counts as nothing: it takes as long as it waits for the others.
int64_t CudaOpCostNs(const DeviceOp& op, int64_t count);

// The most units of `op` that are issued together where jobs take turns of `turn_ns`: all of a sum over devices. A norm
// in such pieces has the bits of the whole.
int64_t CudaOpPiece(const DeviceOp& op, int64_t turn_ns);

}  // namespace shardd

#endif  // SHARDD_SERVER_DEVICE_CUDA_OP_COST_H_
