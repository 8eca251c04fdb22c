#include "common/plan/slab_holes.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "common/plan/layout_internal.h"

namespace shardd {
namespace {

// Limit on the pages that are looked at, whatever a plan claims: larger slabs use larger pages.
constexpr int64_t kMaxPages = int64_t{1} << 20;

int64_t PlannedBytesOf(const ShardPlan& plan, SpreadSlab slab) {
  const MemoryPlan& memory = plan.memory;
  switch (slab) {
    case SpreadSlab::kShards:
      return memory.shards_bytes;
    case SpreadSlab::kParameters:
      return memory.parameters_bytes;
    case SpreadSlab::kGradients:
      return memory.gradients_bytes;
    case SpreadSlab::kOptimizer:
      return memory.optimizer_bytes;
    case SpreadSlab::kPool:
      return memory.unsharded_pool_bytes;
    case SpreadSlab::kStaging:
      return memory.gradient_staging_bytes;
    case SpreadSlab::kKept:
      return memory.kept_bytes;
    case SpreadSlab::kGather:
      return plan.world_size * memory.gather_staging.stride_bytes;
  }
  return 0;
}

// What has holes where parameters are cut over nodes.
std::optional<HeldSlab> HeldSlabOf(SpreadSlab slab) {
  switch (slab) {
    case SpreadSlab::kShards:
      return HeldSlab::kShards;
    case SpreadSlab::kParameters:
      return HeldSlab::kParameters;
    case SpreadSlab::kGradients:
      return HeldSlab::kGradients;
    case SpreadSlab::kOptimizer:
      return HeldSlab::kOptimizer;
    case SpreadSlab::kKept:
      return HeldSlab::kKept;
    case SpreadSlab::kPool:
    case SpreadSlab::kStaging:
    case SpreadSlab::kGather:
      return std::nullopt;
  }
  return std::nullopt;
}

// All holes between ranges but the `most` largest.
std::vector<ByteRange> WithFewHoles(const std::vector<ByteRange>& ranges, size_t most) {
  if (ranges.size() <= most + 1) return ranges;
  const auto hole_bytes = [&](size_t i) { return ranges[i].first - ranges[i - 1].end; };  // before range i
  std::vector<size_t> holes(ranges.size() - 1);
  std::iota(holes.begin(), holes.end(), 1);
  std::stable_sort(holes.begin(), holes.end(), [&](size_t a, size_t b) { return hole_bytes(a) > hole_bytes(b); });
  std::vector<bool> stays(ranges.size(), false);
  for (size_t i = 0; i < most; ++i) stays[holes[i]] = true;
  std::vector<ByteRange> result = {ranges.front()};
  for (size_t i = 1; i < ranges.size(); ++i) {
    if (stays[i]) {
      result.push_back(ranges[i]);
    } else {
      result.back().end = ranges[i].end;
    }
  }
  return result;
}

}  // namespace

int64_t SlabBytesOnGpus(const ShardPlan& plan, SpreadSlab slab, int64_t page_bytes) {
  return plan_internal::RoundUp(PlannedBytesOf(plan, slab), page_bytes);
}

HeldPages FindHeldPages(const ShardPlan& plan, SpreadSlab slab, int gpus, int64_t page_bytes, int max_pieces) {
  const int64_t slab_bytes = SlabBytesOnGpus(plan, slab, page_bytes);
  HeldPages pages;
  pages.page_bytes = page_bytes;
  while (slab_bytes / pages.page_bytes >= kMaxPages) pages.page_bytes *= 2;
  const std::optional<HeldSlab> cut = plan.cut_over_nodes ? HeldSlabOf(slab) : std::nullopt;
  if (!cut.has_value()) {
    pages.ranges = {{0, slab_bytes}};
    return pages;
  }
  const int more = max_pieces - gpus - 1;  // than one on each GPU and a hole at the end
  if (more < 0) {
    pages.ranges = {{0, slab_bytes}};
    return pages;
  }
  std::vector<ByteRange> ranges = {{0, std::min(slab_bytes, pages.page_bytes)}};
  for (ByteRange range : HeldRanges(plan, *cut, pages.page_bytes)) {
    range.end = std::min(range.end, slab_bytes);
    if (range.first <= ranges.back().end) {
      ranges.back().end = std::max(ranges.back().end, range.end);
    } else {
      ranges.push_back(range);
    }
  }
  pages.ranges = WithFewHoles(ranges, static_cast<size_t>(more / 2));
  return pages;
}

MemoryPlan MemoryOnGpus(const ShardPlan& plan, int gpus) {
  MemoryPlan memory = plan.memory;
  if (!plan.cut_over_nodes) return memory;
  const auto held_bytes = [&](SpreadSlab slab) -> int64_t {
    if (SlabBytesOnGpus(plan, slab, kGpuPageBytes) == 0) return 0;
    int64_t bytes = 0;
    for (const ByteRange& range : FindHeldPages(plan, slab, gpus, kGpuPageBytes, MaxPieces(plan, slab)).ranges) {
      bytes += range.end - range.first;
    }
    return bytes;
  };
  memory.held_shards_bytes = held_bytes(SpreadSlab::kShards);
  memory.held_gradients_bytes = held_bytes(SpreadSlab::kGradients);
  memory.held_optimizer_bytes = held_bytes(SpreadSlab::kOptimizer);
  memory.held_parameters_bytes = held_bytes(SpreadSlab::kParameters);
  // Else it is taken on the host, when somebody first hands in.
  if (plan.config.pass_copies()) memory.held_kept_bytes = held_bytes(SpreadSlab::kKept);
  return memory;
}

int64_t QuotaBytesOf(const ShardPlan& plan, bool on_gpus) {
  return on_gpus ? MemoryOnGpus(plan, plan.world_size).TotalBytesOnGpus(plan.world_size)
                 : plan.memory.TotalBytes(plan.world_size);
}

}  // namespace shardd
