#ifndef SHARDD_COMMON_PLAN_SLAB_HOLES_H_
#define SHARDD_COMMON_PLAN_SLAB_HOLES_H_

// Which pages of a job's slabs have memory on this node's GPUs, and how much that is. Pure.

#include <cstdint>
#include <vector>

#include "common/plan/node_part.h"
#include "common/plan/plan.h"
#include "common/plan/slab_spread.h"

namespace shardd {

inline constexpr int64_t kGpuPageBytes = int64_t{2} << 20;  // of cuMemCreate, on all GPUs so far

// The slab's size, rounded up to `page_bytes`; 0: the plan has no bytes for it.
int64_t SlabBytesOnGpus(const ShardPlan& plan, SpreadSlab slab, int64_t page_bytes);

struct HeldPages {
  int64_t page_bytes = 0;         // the GPU's, doubled until the slab has few enough of them
  std::vector<ByteRange> ranges;  // ascending, with holes between them; whole pages, but for the slab's end
};

// Pages of which this node holds something, and the first one, by which the slab is known. A hole costs two pieces, so
// where `max_pieces` do not suffice for all of them, with one piece on each GPU besides, the smallest are filled.
// REQUIRES: the plan has bytes for the slab.
HeldPages FindHeldPages(const ShardPlan& plan, SpreadSlab slab, int gpus, int64_t page_bytes, int max_pieces);

// ShardPlan::memory where `gpus` GPUs of this node have the job's slabs: where parameters are cut over nodes, what is
// held is in pages of GPUs, with holes that are filled. A daemon that may open few files holds more.
// Where there are holes it looks at every page, so nobody calls it for each request.
MemoryPlan MemoryOnGpus(const ShardPlan& plan, int gpus);

// What a quota counts of the plan: all its bytes on this node, on the host or on GPUs, of which each rank has one.
// Takes as long as MemoryOnGpus.
int64_t QuotaBytesOf(const ShardPlan& plan, bool on_gpus);

}  // namespace shardd

#endif  // SHARDD_COMMON_PLAN_SLAB_HOLES_H_
