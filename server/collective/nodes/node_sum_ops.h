#ifndef SHARDD_SERVER_COLLECTIVE_NODES_NODE_SUM_OPS_H_
#define SHARDD_SERVER_COLLECTIVE_NODES_NODE_SUM_OPS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/collective/collective.h"
#include "server/collective/local/local_collective.h"
#include "server/collective/nodes/node_exchange.h"
#include "server/device/device.h"

namespace shardd {

// What this node's devices do for one sum over nodes. A rank's part of it, in memory of staging, is the rank's work
// segments of the group's parameters that some node gives, in their order and in fp32; what touches in the flat
// parameter touches here, and everything else begins at a multiple of kSlabAlignmentBytes. That comes of plan, group
// and NodeSum.present alone, so it is the same on all nodes.
//
// Where parameters are cut over nodes, a rank has such a part for each node, one behind the other: what the ranks of
// its number work on there (common/plan/node_part.h).
struct NodeSumOps {
  // By rank: this node's sources, added up in rank order, unrounded. Zeros where it has none, and between.
  std::vector<std::vector<DeviceOp>> add;
  std::vector<NodePart> parts;  // ascending nodes, where each has its own, and ranks, of those that have any
  // By rank: request.zeros, then the sums over all nodes into the gradient shards.
  std::vector<std::vector<DeviceOp>> finish;
};

// INVALID_ARGUMENT: the request is malformed, or not one of several nodes.
absl::Status CheckNodeSum(const ReduceScatterRequest& request, size_t ranks);

// `staging`: where each rank's part is to lie, slot_bytes of memory of its device. INVALID_ARGUMENT as CheckNodeSum,
// and where a part does not fit. The zeros are taken out of the request.
absl::StatusOr<NodeSumOps> MakeNodeSumOps(LocalCollective& local, ReduceScatterRequest& request,
                                          const std::vector<char*>& staging, int64_t slot_bytes);

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NODES_NODE_SUM_OPS_H_
