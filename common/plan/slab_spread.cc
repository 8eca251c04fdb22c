#include "common/plan/slab_spread.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

#include "common/plan/slab_holes.h"

namespace shardd {
namespace {

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

// Adjacent pages that have memory, which one GPU gets unless its quota ends among them.
struct Stretch {
  int64_t first;  // pages
  int64_t end;
};

// Each begins at a multiple of `longest` pages, or behind a hole, and is no longer.
std::vector<Stretch> Stretches(const HeldPages& held, int64_t longest) {
  std::vector<Stretch> stretches;
  for (const ByteRange& range : held.ranges) {
    const int64_t end = (range.end + held.page_bytes - 1) / held.page_bytes;
    for (int64_t page = range.first / held.page_bytes; page < end;) {
      const int64_t next = std::min(end, (page / longest + 1) * longest);
      stretches.push_back({page, next});
      page = next;
    }
  }
  return stretches;
}

// The GPU of each of the slab's pages.
std::vector<int> Divide(const std::vector<Near>& near, int gpus, const HeldPages& held, int64_t pages,
                        int64_t longest) {
  const std::vector<Stretch> stretches = Stretches(held, longest);
  const auto width = static_cast<size_t>(gpus);
  std::vector<int64_t> stretch_of(static_cast<size_t>(pages), -1);
  int64_t held_pages = 0;
  for (size_t i = 0; i < stretches.size(); ++i) {
    std::fill(stretch_of.begin() + stretches[i].first, stretch_of.begin() + stretches[i].end, static_cast<int64_t>(i));
    held_pages += stretches[i].end - stretches[i].first;
  }
  std::vector<int64_t> bytes(stretches.size() * width, 0);
  std::vector<int64_t> work(width, 0);
  for (const Near& item : near) {
    const int64_t end = item.offset_bytes + item.size_bytes;
    work[static_cast<size_t>(item.gpu)] += item.size_bytes;
    for (int64_t at = item.offset_bytes; at < end;) {
      const int64_t page = at / held.page_bytes;
      const int64_t stretch = stretch_of[static_cast<size_t>(page)];
      const int64_t end_page = stretch < 0 ? page + 1 : stretches[static_cast<size_t>(stretch)].end;
      const int64_t next = std::min(end, end_page * held.page_bytes);
      if (stretch >= 0) bytes[static_cast<size_t>(stretch) * width + static_cast<size_t>(item.gpu)] += next - at;
      at = next;
    }
  }
  std::vector<int64_t> left = Quotas(work, held_pages);
  // Those that a GPU is first for: never more than its quota.
  const auto row = [&](size_t stretch) { return bytes.begin() + static_cast<int64_t>(stretch * width); };
  std::vector<int64_t> most(stretches.size());
  std::vector<size_t> order(stretches.size());
  for (size_t i = 0; i < stretches.size(); ++i) most[i] = *std::max_element(row(i), row(i) + gpus);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return most[a] > most[b]; });
  std::vector<int> gpu_of(static_cast<size_t>(pages), kNoGpu);
  for (const size_t stretch : order) {
    for (int64_t page = stretches[stretch].first; page < stretches[stretch].end;) {
      // On a tie, the GPU of the page before, so that there are few pieces.
      const int before = page == 0 ? -1 : gpu_of[static_cast<size_t>(page - 1)];
      int best = before >= 0 && left[static_cast<size_t>(before)] > 0 ? before : -1;
      for (int gpu = 0; gpu < gpus; ++gpu) {
        if (left[static_cast<size_t>(gpu)] > 0 && (best < 0 || row(stretch)[gpu] > row(stretch)[best])) best = gpu;
      }
      const int64_t count = std::min(left[static_cast<size_t>(best)], stretches[stretch].end - page);
      std::fill_n(gpu_of.begin() + page, count, best);
      left[static_cast<size_t>(best)] -= count;
      page += count;
    }
  }
  return gpu_of;
}

}  // namespace

int MaxPieces(const ShardPlan& plan, SpreadSlab slab) {
  const MemoryPlan& memory = plan.memory;
  if (slab != SpreadSlab::kKept || memory.snapshot_bytes == 0) return kMaxSlabPieces;
  const int64_t sections = 1 + (memory.snapshot_bytes > memory.shards_bytes ? plan.optimizer_states : 0);
  return static_cast<int>(memory.kept_bytes / memory.snapshot_bytes * sections * kMaxSlabPieces);
}

std::vector<SlabPiece> SpreadOverGpus(const ShardPlan& plan, SpreadSlab slab, int gpus, int64_t page_bytes,
                                      int max_pieces) {
  const int64_t slab_bytes = SlabBytesOnGpus(plan, slab, page_bytes);
  if (slab_bytes == 0) return {};
  if (gpus == 1 && !plan.cut_over_nodes) return {{0, slab_bytes}};
  const std::vector<Near> near = NearOf(plan, slab, gpus);
  const HeldPages held = FindHeldPages(plan, slab, gpus, page_bytes, max_pieces);
  const int64_t pages = (slab_bytes + held.page_bytes - 1) / held.page_bytes;
  for (int64_t longest = 1; longest < 2 * pages; longest *= 2) {
    std::vector<SlabPiece> pieces;
    int64_t left_bytes = slab_bytes;
    for (const int gpu : Divide(near, gpus, held, pages, longest)) {
      const int64_t size_bytes = std::min(held.page_bytes, left_bytes);
      left_bytes -= size_bytes;
      if (pieces.empty() || pieces.back().gpu != gpu) pieces.push_back({gpu, 0});
      pieces.back().size_bytes += size_bytes;
    }
    if (static_cast<int>(pieces.size()) <= max_pieces) return pieces;
  }
  return {{0, slab_bytes}};  // fewer pieces than GPUs
}

}  // namespace shardd
