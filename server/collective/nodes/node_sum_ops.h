#ifndef SHARDD_SERVER_COLLECTIVE_NODES_NODE_SUM_OPS_H_
#define SHARDD_SERVER_COLLECTIVE_NODES_NODE_SUM_OPS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/collective/nodes/node_exchange.h"
#include "server/device/device_op.h"

namespace shardd {

class LocalCollective;
struct ReduceScatterRequest;

// The work of this node's devices for one reduction over nodes. A rank's part, in staging, has the rank's work segments
// of the group's parameters that some node contributes, in order and in fp32. Segments that are adjacent in the flat
// parameter are adjacent here; every other one begins at a multiple of kSlabAlignmentBytes. This layout depends only on
// plan, group and NodeSum.present, so it is the same on all nodes.
//
// If parameters are cut over nodes, a rank has one such part per node of a row, one after the other: what the ranks of
// its number work on there (common/plan/node_part.h).
struct NodeSumOps {
  // By rank: adds this node's sources in rank order, unrounded. Zeros between them, and if there are none.
  std::vector<std::vector<DeviceOp>> add;
  std::vector<NodePart> parts;  // ascending by node (if each has its own) and rank, without empty ones
  // By rank: request.zeros, then the sums over all nodes into the gradient shards.
  std::vector<std::vector<DeviceOp>> finish;
};

// INVALID_ARGUMENT: the request is malformed, or not one of several nodes.
absl::Status CheckNodeSum(const ReduceScatterRequest& request, size_t ranks);

// `staging`: memory for each rank's part on its device, slot_bytes each. INVALID_ARGUMENT as CheckNodeSum, and if a
// part does not fit. Moves the zeros out of the request.
absl::StatusOr<NodeSumOps> MakeNodeSumOps(LocalCollective& local, ReduceScatterRequest& request,
                                          const std::vector<char*>& staging, int64_t slot_bytes);

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NODES_NODE_SUM_OPS_H_
