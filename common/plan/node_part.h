#ifndef SHARDD_COMMON_PLAN_NODE_PART_H_
#define SHARDD_COMMON_PLAN_NODE_PART_H_

// Jobs whose parameters are cut over nodes (ShardPlan::cut_over_nodes): what each node holds, and who adds what. The
// slabs and images of such a job are laid out as everybody else's, the whole flat parameter in one range, so offsets
// are the same on all nodes; a node has memory for what its ranks hold of slabs, and for nothing between.
//
// Rank r of each node adds, of its own node's gradients, what ranks r of all nodes work on. So a rank's part of a sum
// falls into one piece for each node, and what rank r of node m needs of all nodes lies with the ranks r of those.

#include <cstdint>
#include <vector>

#include "common/plan/plan.h"

namespace shardd {

// Elements of one flat parameter; numel > 0.
struct FlatRange {
  int flat_param = 0;
  int64_t offset = 0;
  int64_t numel = 0;
};

// What `node` holds of the group's parameters, in the order of its flat parameters and ascending, ranges that touch in
// one; without padding at the ends of ranges. All nodes together hold every element of a parameter once.
// REQUIRES: cut_over_nodes, a node and a group of the plan.
std::vector<FlatRange> NodeRanges(const ShardPlan& plan, int group, int node);

// What `node`'s ranks hold of one parameter: side by side, in both layouts; none: numel 0.
// REQUIRES: cut_over_nodes, a node and a parameter of the plan.
ParamRange NodeRangeOf(const ShardPlan& plan, int param, int node);

// WorkSegments of rank `rank` of node `node`; of the plan's own node the same as WorkSegments.
// REQUIRES: cut_over_nodes, or `node` is the plan's.
std::vector<Segment> WorkSegmentsOn(const ShardPlan& plan, int flat_param, int rank, int node);

// Bytes [first, end) of a slab, whole pages.
struct ByteRange {
  int64_t first = 0;
  int64_t end = 0;
};
inline constexpr int64_t kHeldPageBytes = 4096;

// Which pages of a slab this node holds something of: ascending, none touches the next. All of them where nothing is
// cut over nodes; none of a slab that the plan has not.
enum class HeldSlab { kShards, kGradients, kOptimizer };
std::vector<ByteRange> HeldRanges(const ShardPlan& plan, HeldSlab which);

}  // namespace shardd

#endif  // SHARDD_COMMON_PLAN_NODE_PART_H_
