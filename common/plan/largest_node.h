#ifndef SHARDD_COMMON_PLAN_LARGEST_NODE_H_
#define SHARDD_COMMON_PLAN_LARGEST_NODE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "common/plan/plan.h"
#include "shardd/v1/model.pb.h"

namespace shardd {

struct LargestNode {
  ShardPlan plan;           // of the first node that needs most; ShardPlan::node says which
  int64_t least_bytes = 0;  // what a node needs that needs least
  int64_t total_bytes = 0;  // what this one needs
};

// Nodes over which parameters are cut hold unlike amounts where some parameters are whole on one of them
// (whole_params.h), and pieces that differ by rounding otherwise. A job fits if its largest node does. `on_gpus`: which
// of the two totals of MemoryPlan counts. Errors as PlanShards. Plans once for each node of a row.
absl::StatusOr<LargestNode> PlanLargestNode(const v1::JobSpec& spec, bool on_gpus);

}  // namespace shardd

#endif  // SHARDD_COMMON_PLAN_LARGEST_NODE_H_
