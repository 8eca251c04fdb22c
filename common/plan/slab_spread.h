#ifndef SHARDD_COMMON_PLAN_SLAB_SPREAD_H_
#define SHARDD_COMMON_PLAN_SLAB_SPREAD_H_

// Divides the slabs of a job over its GPUs. A slab is one range of addresses, made of adjacent pieces, each on one GPU,
// so layouts, offsets and the zero-copy unshard do not know of it. Pure.

#include <cstdint>
#include <vector>

#include "common/plan/plan.h"

namespace shardd {

enum class SpreadSlab { kShards, kParameters, kGradients, kOptimizer, kPool, kStaging, kKept, kGather };

// Limit of pieces of a slab that trainers map; each is a descriptor in the daemon and an import in every trainer. With
// as many ranks as GPUs it allows 128 groups on 8 GPUs, each on the GPU that works on it.
inline constexpr int kMaxSlabPieces = 1024;
// The most pieces of a slab: kMaxSlabPieces, and for kKept, which no trainer maps, so many for each of its sections.
int MaxPieces(const ShardPlan& plan, SpreadSlab slab);

// The bytes of a slab from the end of the previous piece, size_bytes long.
inline constexpr int kNoGpu = -1;
struct SlabPiece {
  int gpu = 0;  // 0 to gpus - 1; kNoGpu: of other nodes, without memory here
  int64_t size_bytes = 0;
};

// Divides a slab over `gpus` GPUs (1 to the world size); rank r is on GPU r mod `gpus`. Every page goes to the GPU
// whose ranks work on most of its bytes (WorkSegments; for the pool and staging, the ranks that read it), and every GPU
// gets its share of all work, to within one page. Adjacent pages of one GPU are one piece. If there would be more than
// `max_pieces`, stretches of 2, 4, 8 ... pages go to one GPU until there are not, which keeps bound and shares at the
// cost of nearness. The pieces add up to the slab's size, rounded up to `page_bytes`; empty if the plan has no bytes
// for the slab. Where parameters are cut over nodes, pages of shards, gradients, optimizer state and snapshots of which
// this node holds nothing are on no GPU (HeldPages).
std::vector<SlabPiece> SpreadOverGpus(const ShardPlan& plan, SpreadSlab slab, int gpus, int64_t page_bytes,
                                      int max_pieces = kMaxSlabPieces);

}  // namespace shardd

#endif  // SHARDD_COMMON_PLAN_SLAB_SPREAD_H_
