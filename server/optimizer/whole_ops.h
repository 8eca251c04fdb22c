#ifndef SHARDD_SERVER_OPTIMIZER_WHOLE_OPS_H_
#define SHARDD_SERVER_OPTIMIZER_WHOLE_OPS_H_

#include <vector>

#include "common/plan/plan.h"
#include "server/device/device_op.h"
#include "server/optimizer/decided_step.h"

namespace shardd {

// Operations that update the whole parameters that `rank` has to update (RanksOfWholeParams), whoever holds their
// elements: whole shards, all replicas' copies of them, and cast copies, as UpdateOps.
std::vector<DeviceOp> WholeOps(const ShardPlan& plan, const SlabPointers& slabs, const DecidedStep& step, int rank,
                               Logged logged);

}  // namespace shardd

#endif  // SHARDD_SERVER_OPTIMIZER_WHOLE_OPS_H_
