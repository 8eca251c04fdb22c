#ifndef SHARDD_COMMON_PLAN_SLAB_SPREAD_H_
#define SHARDD_COMMON_PLAN_SLAB_SPREAD_H_

// How the slabs of a job are divided over its GPUs. A slab is one range of addresses, made of pieces that lie side by
// side, each on one GPU; so layouts, offsets and the zero-copy unshard do not know of it. Pure.

#include <cstdint>
#include <vector>

#include "common/plan/plan.h"

namespace shardd {

enum class SpreadSlab { kShards, kParameters, kGradients, kOptimizer, kPool, kStaging, kKept };

// No slab has more, of which each is a descriptor in the daemon, and an import in every trainer. With as many ranks as
// GPUs that is 128 groups on 8 of them, each on the GPU that works on it.
inline constexpr int kMaxSlabPieces = 1024;

// [end of the one before, that + size_bytes) of the slab.
struct SlabPiece {
  int gpu = 0;  // 0 to gpus - 1
  int64_t size_bytes = 0;
};

// Rank r is at GPU r mod `gpus`, 1 to the world size. Every page is on the GPU whose ranks work on most of its bytes
// (WorkSegments; the pool's, on that of the ranks that read it, staging likewise), and every GPU has as many as its
// part of all work is, to one page. Neighbours on one GPU are one piece; where there would be more than `max_pieces`
// (at least one), pages are taken twice as large, and so on, so that what is bounded is kept and nearness is lost.
// Together the pieces are the slab's size, rounded up to `page_bytes`; empty where the plan has no bytes for it.
std::vector<SlabPiece> SpreadOverGpus(const ShardPlan& plan, SpreadSlab slab, int gpus, int64_t page_bytes,
                                      int max_pieces = kMaxSlabPieces);

}  // namespace shardd

#endif  // SHARDD_COMMON_PLAN_SLAB_SPREAD_H_
