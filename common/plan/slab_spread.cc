#include "common/plan/slab_spread.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <optional>
#include <utility>

#include "common/plan/layout_internal.h"
#include "common/plan/node_part.h"

namespace shardd {
namespace {

// Limit on the pages that the division looks at, whatever a plan claims: larger slabs use larger pages.
constexpr int64_t kMaxPages = int64_t{1} << 20;

// A byte range of a slab, and the GPU that works on it.
struct Near {
  int64_t offset_bytes;
  int64_t size_bytes;
  int gpu;
};

void AddSegments(const std::vector<Segment>& segments, int64_t flat_offset_bytes, int64_t element_bytes, int gpu,
                 std::vector<Near>& all) {
  for (const Segment& segment : segments) {
    all.push_back({flat_offset_bytes + segment.offset * element_bytes, segment.numel * element_bytes, gpu});
  }
}

std::vector<Near> NearOfPool(const ShardPlan& plan, int gpus) {
  std::vector<Near> all;
  for (size_t pool = 0; pool < plan.pools.size(); ++pool) {
    const int64_t begin = plan.pools[pool].offset_bytes;
    const int64_t end =
        pool + 1 < plan.pools.size() ? plan.pools[pool + 1].offset_bytes : plan.memory.unsharded_pool_bytes;
    all.push_back({begin, end - begin, static_cast<int>(pool) % gpus});
  }
  return all;
}

std::vector<Near> NearOfStaging(const ShardPlan& plan, int gpus) {
  std::vector<Near> all;
  for (int place = 0; place < plan.staging_count(); ++place) {
    all.push_back({place * plan.staging_stride_bytes, plan.staging_stride_bytes, place % gpus});
  }
  return all;
}

std::vector<Near> NearOfGather(const ShardPlan& plan, int gpus) {
  std::vector<Near> all;
  const int64_t stride_bytes = plan.memory.gather_staging.stride_bytes;
  for (int rank = 0; rank < plan.world_size; ++rank) all.push_back({rank * stride_bytes, stride_bytes, rank % gpus});
  return all;
}

std::vector<Near> NearOf(const ShardPlan& plan, SpreadSlab slab, int gpus);

// Of each snapshot (over nodes there are two): shards, followed by the optimizer state that trainers keep. Each byte is
// near what it is a copy of.
std::vector<Near> NearOfKept(const ShardPlan& plan, int gpus) {
  const MemoryPlan& memory = plan.memory;
  std::vector<Near> all;
  const auto add = [&](SpreadSlab slab, int64_t begin_bytes) {
    for (Near near : NearOf(plan, slab, gpus)) {
      near.offset_bytes += begin_bytes;
      all.push_back(near);
    }
  };
  for (int64_t begin_bytes = 0; begin_bytes < memory.kept_bytes; begin_bytes += memory.snapshot_bytes) {
    add(SpreadSlab::kShards, begin_bytes);
    if (memory.snapshot_bytes > memory.shards_bytes) add(SpreadSlab::kOptimizer, begin_bytes + memory.shards_bytes);
  }
  return all;
}

std::vector<Near> NearOf(const ShardPlan& plan, SpreadSlab slab, int gpus) {
  if (slab == SpreadSlab::kStaging) return NearOfStaging(plan, gpus);
  if (slab == SpreadSlab::kGather) return NearOfGather(plan, gpus);
  if (slab == SpreadSlab::kPool) return NearOfPool(plan, gpus);
  if (slab == SpreadSlab::kKept) return NearOfKept(plan, gpus);
  constexpr int64_t kFp32Bytes = 4;
  std::vector<Near> all;
  for (size_t f = 0; f < plan.flat_params.size(); ++f) {
    const FlatParamPlan& flat = plan.flat_params[f];
    for (int rank = 0; rank < plan.world_size; ++rank) {
      const int gpu = rank % gpus;
      const std::vector<Segment> work = WorkSegments(plan, static_cast<int>(f), rank);
      if (slab == SpreadSlab::kShards) {
        for (int copy = 0; copy < plan.shard_copies; ++copy) {
          AddSegments(work, flat.shards_offset_bytes + copy * plan.shards_stride_bytes, DTypeSizeBytes(flat.dtype), gpu,
                      all);
        }
      } else if (slab == SpreadSlab::kParameters && flat.params_offset_bytes >= 0) {
        AddSegments(work, flat.params_offset_bytes, DTypeSizeBytes(flat.unsharded_dtype), gpu, all);
      } else if (slab == SpreadSlab::kGradients && flat.gradients_offset_bytes >= 0) {
        AddSegments(work, flat.gradients_offset_bytes, kFp32Bytes, gpu, all);
        // A replica's copy is near that replica's ranks: they change it often, and the daemon writes it once.
        const int copy = plan.placement.replica_index[static_cast<size_t>(rank)];
        if (copy > 0 && copy < plan.gradient_copies) {
          AddSegments(OwnedSegments(plan, Purpose::kGradients, static_cast<int>(f), rank),
                      flat.gradients_offset_bytes + copy * plan.gradients_stride_bytes, kFp32Bytes, gpu, all);
        }
      } else if (slab == SpreadSlab::kOptimizer && flat.optimizer_offset_bytes >= 0) {
        for (int state = 0; state < flat.optimizer_states * plan.optimizer_copies; ++state) {
          const int64_t copy_bytes = state / flat.optimizer_states * plan.optimizer_stride_bytes;
          AddSegments(
              work, flat.optimizer_offset_bytes + copy_bytes + state % flat.optimizer_states * flat.StateStrideBytes(),
              kFp32Bytes, gpu, all);
        }
      }
    }
  }
  return all;
}

int64_t SlabBytes(const ShardPlan& plan, SpreadSlab slab) {
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

// How many of `pages` each GPU gets: its share of all work, by largest remainders, so that none is off by a page or
// more.
std::vector<int64_t> Quotas(const std::vector<int64_t>& work, int64_t pages) {
  const auto total = std::accumulate(work.begin(), work.end(), 0.0);
  std::vector<int64_t> quotas(work.size());
  std::vector<std::pair<double, size_t>> remainders;
  int64_t given = 0;
  for (size_t gpu = 0; gpu < work.size(); ++gpu) {
    const double part = total > 0 ? static_cast<double>(work[gpu]) / total : 1.0 / static_cast<double>(work.size());
    const double exact = part * static_cast<double>(pages);
    quotas[gpu] = static_cast<int64_t>(exact);
    given += quotas[gpu];
    remainders.emplace_back(static_cast<double>(quotas[gpu]) - exact, gpu);
  }
  std::sort(remainders.begin(), remainders.end());
  for (size_t i = 0; given < pages; i = (i + 1) % remainders.size(), ++given) ++quotas[remainders[i].second];
  return quotas;
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

// Which pages have memory.
std::vector<bool> HeldPages(const ShardPlan& plan, SpreadSlab slab, int64_t pages, int64_t page_bytes) {
  const std::optional<HeldSlab> cut = plan.cut_over_nodes ? HeldSlabOf(slab) : std::nullopt;
  std::vector<bool> held(static_cast<size_t>(pages), !cut.has_value());
  held[0] = true;
  if (!cut.has_value()) return held;
  for (const ByteRange& range : HeldRanges(plan, *cut)) {
    const int64_t end = std::min(pages, (range.end + page_bytes - 1) / page_bytes);
    for (int64_t page = range.first / page_bytes; page < end; ++page) held[static_cast<size_t>(page)] = true;
  }
  return held;
}

// The GPU of each page that is held.
std::vector<int> Divide(const std::vector<Near>& near, int gpus, const std::vector<bool>& held, int64_t page_bytes) {
  const auto pages = static_cast<int64_t>(held.size());
  const auto width = static_cast<size_t>(gpus);
  std::vector<int64_t> bytes(static_cast<size_t>(pages) * width, 0);
  std::vector<int64_t> work(width, 0);
  for (const Near& item : near) {
    const int64_t end = item.offset_bytes + item.size_bytes;
    work[static_cast<size_t>(item.gpu)] += item.size_bytes;
    for (int64_t at = item.offset_bytes; at < end;) {
      const int64_t page = at / page_bytes;
      const int64_t next = std::min(end, (page + 1) * page_bytes);
      bytes[static_cast<size_t>(page) * width + static_cast<size_t>(item.gpu)] += next - at;
      at = next;
    }
  }
  std::vector<int64_t> left = Quotas(work, std::count(held.begin(), held.end(), true));
  // Pages that a GPU is first for: never more than its quota.
  const auto row = [&](int64_t page) { return bytes.begin() + page * gpus; };
  std::vector<int64_t> most(static_cast<size_t>(pages));
  std::vector<int64_t> order(static_cast<size_t>(pages));
  for (int64_t page = 0; page < pages; ++page) {
    most[static_cast<size_t>(page)] = *std::max_element(row(page), row(page) + gpus);
  }
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return most[static_cast<size_t>(a)] > most[static_cast<size_t>(b)]; });
  std::vector<int> gpu_of(static_cast<size_t>(pages), kNoGpu);
  for (const int64_t page : order) {
    if (!held[static_cast<size_t>(page)]) continue;  // kNoGpu
    // On a tie, the GPU of the page before, so that there are few pieces.
    const int before = page == 0 ? -1 : gpu_of[static_cast<size_t>(page - 1)];
    int best = before >= 0 && left[static_cast<size_t>(before)] > 0 ? before : -1;
    for (int gpu = 0; gpu < gpus; ++gpu) {
      if (left[static_cast<size_t>(gpu)] > 0 && (best < 0 || row(page)[gpu] > row(page)[best])) best = gpu;
    }
    gpu_of[static_cast<size_t>(page)] = best;
    --left[static_cast<size_t>(best)];
  }
  return gpu_of;
}

}  // namespace

std::vector<SlabPiece> SpreadOverGpus(const ShardPlan& plan, SpreadSlab slab, int gpus, int64_t page_bytes,
                                      int max_pieces) {
  const int64_t rounded_bytes = plan_internal::RoundUp(SlabBytes(plan, slab), page_bytes);
  if (rounded_bytes == 0) return {};
  if (gpus == 1 && !plan.cut_over_nodes) return {{0, rounded_bytes}};
  const std::vector<Near> near = NearOf(plan, slab, gpus);
  int64_t unit_bytes = page_bytes;
  while (rounded_bytes / unit_bytes >= kMaxPages) unit_bytes *= 2;
  while (true) {
    const std::vector<int> gpu_of = Divide(
        near, gpus, HeldPages(plan, slab, (rounded_bytes + unit_bytes - 1) / unit_bytes, unit_bytes), unit_bytes);
    std::vector<SlabPiece> pieces;
    int64_t left_bytes = rounded_bytes;
    for (const int gpu : gpu_of) {
      const int64_t size_bytes = std::min(unit_bytes, left_bytes);
      left_bytes -= size_bytes;
      if (pieces.empty() || pieces.back().gpu != gpu) pieces.push_back({gpu, 0});
      pieces.back().size_bytes += size_bytes;
    }
    if (static_cast<int>(pieces.size()) <= std::max(1, max_pieces)) return pieces;
    unit_bytes *= 2;
  }
}

}  // namespace shardd
