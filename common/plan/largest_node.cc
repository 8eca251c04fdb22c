#include "common/plan/largest_node.h"

#include <algorithm>
#include <utility>

#include "common/plan/node_part.h"
#include "common/plan/slab_holes.h"
#include "common/status/status_macros.h"

namespace shardd {

absl::StatusOr<LargestNode> PlanLargestNode(const v1::JobSpec& spec, bool on_gpus) {
  LargestNode largest;
  SHARDD_ASSIGN_OR_RETURN(largest.plan, PlanShards(spec));
  largest.total_bytes = largest.least_bytes = QuotaBytesOf(largest.plan, on_gpus);
  const int unlike = largest.plan.cut_over_nodes ? NodesOfRow(largest.plan) : 1;
  for (int node = 1; node < unlike; ++node) {
    SHARDD_ASSIGN_OR_RETURN(ShardPlan plan, PlanShards(spec, node));
    const int64_t bytes = QuotaBytesOf(plan, on_gpus);
    largest.least_bytes = std::min(largest.least_bytes, bytes);
    if (bytes > largest.total_bytes) {
      largest.total_bytes = bytes;
      largest.plan = std::move(plan);
    }
  }
  return largest;
}

}  // namespace shardd
