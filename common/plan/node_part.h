#ifndef SHARDD_COMMON_PLAN_NODE_PART_H_
#define SHARDD_COMMON_PLAN_NODE_PART_H_

// Jobs whose parameters are cut over nodes (ShardPlan::cut_over_nodes): what each node holds, and which rank reduces
// what. Slabs and images are laid out as in any other job, with each whole flat parameter in one range, so offsets are
// the same on all nodes. A node has memory only for what its own ranks hold.
//
// The nodes over which one copy is cut are a row. All nodes are one row, or the nodes 0 to k-1 are row 0, the next k
// row 1, and so on (a hybrid strategy whose shard groups span nodes); rows are replicas of each other. Node n has place
// n mod k in its row, and all nodes with the same place hold the same. `node` below is a node of any row, or a place.
//
// Rank r of each node reduces, of its own node's gradients, what the ranks r of all places work on. So a rank's part of
// a reduction has one piece per place, and what rank r of a node needs from the others of its row is with their ranks
// r.

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

// Number of nodes in a row, k above; 1: nothing is cut over nodes.
int NodesOfRow(const ShardPlan& plan);
// Whether there are several rows.
bool HasRows(const ShardPlan& plan);

// The ranges of the group's parameters that `node` holds, in the order of its flat parameters and ascending, adjacent
// ranges merged, without padding at the ends of ranges. The nodes of a row hold every element of a parameter once.
// REQUIRES: cut_over_nodes; the plan has the node and the group.
std::vector<FlatRange> NodeRanges(const ShardPlan& plan, int group, int node);

// Whether ranks read the flat parameter rounded to float8 (MixedPrecision.float8_gathers), which is also how its parts
// travel: in blocks that begin with what a node holds of each parameter, so that no block mixes two parameters, and no
// node needs another one's values to round its own. False for integers, which are gathered as they are.
bool IsFloat8(const ShardPlan& plan, int flat_param);
// NodeRanges of one flat parameter.
std::vector<FlatRange> NodeRangesOf(const ShardPlan& plan, int flat_param, int node);
// The ranges of the flat parameter that `node` holds, one for each parameter of which it holds something, in their
// order. REQUIRES: cut_over_nodes; the plan has the node.
std::vector<FlatRange> NodeRangesByParam(const ShardPlan& plan, int flat_param, int node);

// The elements of one parameter that `node`'s ranks hold, which are adjacent in both layouts; none: numel 0. REQUIRES:
// cut_over_nodes; the plan has the node and the parameter.
ParamRange NodeRangeOf(const ShardPlan& plan, int param, int node);

// WorkSegments of rank `rank` of node `node`; the same as WorkSegments for the plan's own place. REQUIRES:
// cut_over_nodes, or `node` is the plan's.
std::vector<Segment> WorkSegmentsOn(const ShardPlan& plan, int flat_param, int rank, int node);

// On GPUs, where NCCL moves parts between the GPUs k of all nodes (server/collective/nodes/nccl/nccl_gather.h).
inline constexpr int64_t kRailAlignmentBytes = 64;  // of each range of a part
inline constexpr int kGatherSlots = 2;              // of what came from other nodes
// Bytes of what `rank` of `node` holds of a group, in unsharded dtypes; 0: nothing.
int64_t RailBytes(const ShardPlan& plan, int group, int node, int rank);

// Computes MemoryPlan::gather_staging, in time that grows with groups, nodes and ranks. REQUIRES: the plan's parameters
// are placed.
GatherStaging SizeGatherStaging(const ShardPlan& plan);

// Bytes [first, end) of a slab.
struct ByteRange {
  int64_t first = 0;
  int64_t end = 0;
};
inline constexpr int64_t kHeldPageBytes = 4096;

// The pages of a slab, or other units, of which this node holds something: ascending, no two ranges adjacent. All where
// HasHoles is false; none if the plan has no such slab. Nodes with one place have the same.
enum class HeldSlab { kShards, kGradients, kOptimizer, kParameters, kKept };
std::vector<ByteRange> HeldRanges(const ShardPlan& plan, HeldSlab which, int64_t unit_bytes = kHeldPageBytes);
// Whether a slab has memory for some of its pages alone: parameters are cut over nodes, or parameters have less
// optimizer state than elements (StateNumel).
bool HasHoles(const ShardPlan& plan, HeldSlab which);

// Old bytes of a slab are kept in chunks (server/storage/undo_slab.h). The most that they take is all chunks that have
// something that this node holds.
inline constexpr int64_t kUndoChunkBytes = int64_t{64} << 10;
int64_t HeldChunksBytes(const ShardPlan& plan, HeldSlab which);

}  // namespace shardd

#endif  // SHARDD_COMMON_PLAN_NODE_PART_H_
