#include "common/plan/node_part.h"

#include <algorithm>

#include "common/plan/layout_internal.h"
#include "common/plan/whole_params.h"
#include "common/tensor/float8_blocks.h"

namespace shardd {
namespace {

using plan_internal::RoundUp;

void AddUnits(int64_t first, int64_t end, int64_t unit_bytes, std::vector<ByteRange>& ranges) {
  if (first < end) ranges.push_back({first / unit_bytes * unit_bytes, RoundUp(end, unit_bytes)});
}

// Merges each range that `touches` the one before it into that one. REQUIRES: ascending.
template <typename Range, typename Touches, typename Extend>
std::vector<Range> Merged(const std::vector<Range>& ranges, Touches touches, Extend extend) {
  std::vector<Range> merged;
  for (const Range& range : ranges) {
    if (!merged.empty() && touches(merged.back(), range)) {
      extend(merged.back(), range);
    } else {
      merged.push_back(range);
    }
  }
  return merged;
}

// Of a rank of a node of any row.
int PlaceOn(const ShardPlan& plan, int node, int rank) { return node % NodesOfRow(plan) * plan.world_size + rank; }

// What of a state this node holds, where some parameters have less of it than they have elements.
std::vector<FlatRange> StatesOf(const ShardPlan& plan, int flat_param, int state) {
  std::vector<FlatRange> ranges;
  for (const int param : plan.flat_params[static_cast<size_t>(flat_param)].params) {
    const ParamPlan& of = plan.params[static_cast<size_t>(param)];
    const ParamRange own = plan.cut_over_nodes ? NodeRangeOf(plan, param, plan.node) : ParamRange{0, of.numel};
    const int64_t end = std::min(own.first + own.numel, StateNumel(plan, param, state));
    if (own.first < end) ranges.push_back({flat_param, of.offset + own.first, end - own.first});
  }
  return ranges;
}

}  // namespace

int NodesOfRow(const ShardPlan& plan) { return plan_internal::Places(plan) / plan.world_size; }

bool HasRows(const ShardPlan& plan) { return plan.cut_over_nodes && NodesOfRow(plan) < plan.nodes(); }

std::vector<FlatRange> NodeRangesOf(const ShardPlan& plan, int flat_param, int node) {
  std::vector<FlatRange> ranges;
  for (int rank = 0; rank < plan.world_size; ++rank) {
    for (const Segment& segment : WorkSegmentsOn(plan, flat_param, rank, node)) {
      ranges.push_back({flat_param, segment.offset, segment.numel});
    }
  }
  std::sort(ranges.begin(), ranges.end(), [](const FlatRange& a, const FlatRange& b) { return a.offset < b.offset; });
  return Merged(
      ranges, [](const FlatRange& a, const FlatRange& b) { return a.offset + a.numel == b.offset; },
      [](FlatRange& a, const FlatRange& b) { a.numel += b.numel; });
}

std::vector<FlatRange> NodeRanges(const ShardPlan& plan, int group, int node) {
  std::vector<FlatRange> ranges;
  for (const int f : plan.groups[static_cast<size_t>(group)].flat_params) {
    const std::vector<FlatRange> of_flat = NodeRangesOf(plan, f, node);
    ranges.insert(ranges.end(), of_flat.begin(), of_flat.end());
  }
  return ranges;
}

bool IsFloat8(const ShardPlan& plan, int flat_param) {
  const FlatParamPlan& flat = plan.flat_params[static_cast<size_t>(flat_param)];
  return plan.groups[static_cast<size_t>(flat.group)].mixed_precision.float8_gathers() &&
         HasFloat8Blocks(flat.unsharded_dtype);
}

std::vector<FlatRange> NodeRangesByParam(const ShardPlan& plan, int flat_param, int node) {
  std::vector<FlatRange> ranges;
  for (const int param : plan.flat_params[static_cast<size_t>(flat_param)].params) {
    const ParamRange own = NodeRangeOf(plan, param, node);
    if (own.numel > 0) {
      ranges.push_back({flat_param, plan.params[static_cast<size_t>(param)].offset + own.first, own.numel});
    }
  }
  return ranges;
}

ParamRange NodeRangeOf(const ShardPlan& plan, int param, int node) {
  int64_t first = plan.params[static_cast<size_t>(param)].numel;
  int64_t end = 0;
  for (int rank = 0; rank < plan.world_size; ++rank) {
    const ParamRange own = plan_internal::PlaceRange(plan, Purpose::kParameters, param, PlaceOn(plan, node, rank));
    if (own.numel > 0) {
      first = std::min(first, own.first);
      end = std::max(end, own.first + own.numel);
    }
  }
  return {std::min(first, end), end - std::min(first, end)};
}

std::vector<Segment> WorkSegmentsOn(const ShardPlan& plan, int flat_param, int rank, int node) {
  if (!plan.cut_over_nodes) {
    return WorkSegments(plan, flat_param, rank);
  }
  return plan_internal::PlaceSegments(plan, flat_param, PlaceOn(plan, node, rank));
}

int64_t RailBytes(const ShardPlan& plan, int group, int node, int rank) {
  int64_t bytes = 0;
  for (const int f : plan.groups[static_cast<size_t>(group)].flat_params) {
    int64_t end = -1;  // of the range before
    for (const Segment& segment : WorkSegmentsOn(plan, f, rank, node)) {
      if (segment.offset != end) bytes = RoundUp(bytes, kRailAlignmentBytes);
      bytes += segment.numel * DTypeSizeBytes(plan.flat_params[static_cast<size_t>(f)].unsharded_dtype);
      end = segment.offset + segment.numel;
    }
  }
  return bytes;
}

GatherStaging SizeGatherStaging(const ShardPlan& plan) {
  GatherStaging staging;
  if (!plan.cut_over_nodes) return staging;
  for (size_t group = 0; group < plan.groups.size(); ++group) {
    for (int rank = 0; rank < plan.world_size; ++rank) {
      int64_t others_bytes = 0;
      for (int node = 0; node < NodesOfRow(plan); ++node) {
        const int64_t bytes = RoundUp(RailBytes(plan, static_cast<int>(group), node, rank), kRailAlignmentBytes);
        if (node == plan.node) {
          staging.own_bytes = std::max(staging.own_bytes, bytes);
        } else {
          others_bytes += bytes;
        }
      }
      staging.slot_bytes = std::max(staging.slot_bytes, others_bytes);
    }
  }
  staging.greeting_bytes = int64_t{2} * plan.nodes() * kRailAlignmentBytes;
  staging.stride_bytes =
      RoundUp(staging.own_bytes + kGatherSlots * staging.slot_bytes + staging.greeting_bytes, kPoolAlignmentBytes);
  return staging;
}

bool HasHoles(const ShardPlan& plan, HeldSlab which) {
  return plan.cut_over_nodes || (which == HeldSlab::kOptimizer && HasShortStates(plan));
}

std::vector<ByteRange> HeldRanges(const ShardPlan& plan, HeldSlab which, int64_t unit_bytes) {
  const MemoryPlan& memory = plan.memory;
  const int64_t size = which == HeldSlab::kShards       ? memory.shards_bytes
                       : which == HeldSlab::kGradients  ? memory.gradients_bytes
                       : which == HeldSlab::kOptimizer  ? memory.optimizer_bytes
                       : which == HeldSlab::kParameters ? memory.parameters_bytes
                                                        : memory.kept_bytes;
  std::vector<ByteRange> ranges;
  if (!HasHoles(plan, which)) {
    AddUnits(0, size, unit_bytes, ranges);
    return ranges;
  }
  const bool short_states = HasShortStates(plan);
  // The layout of a snapshot is that of the shards, and then that of the state.
  const int64_t stride = which == HeldSlab::kKept ? memory.snapshot_bytes : 0;
  const int64_t copies = stride > 0 ? memory.kept_bytes / stride : 1;
  for (size_t f = 0; f < plan.flat_params.size(); ++f) {
    const FlatParamPlan& flat = plan.flat_params[f];
    const auto add = [&](int64_t base_bytes, int64_t element_bytes, const std::vector<FlatRange>& own) {
      for (int64_t copy = 0; copy < copies; ++copy) {
        for (const FlatRange& range : own) {
          const int64_t first = copy * stride + base_bytes + range.offset * element_bytes;
          AddUnits(first, first + range.numel * element_bytes, unit_bytes, ranges);
        }
      }
    };
    const std::vector<FlatRange> own = plan.cut_over_nodes
                                           ? NodeRangesOf(plan, static_cast<int>(f), plan.node)
                                           : std::vector<FlatRange>{{static_cast<int>(f), 0, flat.numel}};
    const bool kept = which == HeldSlab::kKept && stride > 0;
    if (which == HeldSlab::kShards || kept) {
      add(flat.shards_offset_bytes, DTypeSizeBytes(flat.dtype), own);
    }
    if (which == HeldSlab::kParameters && flat.params_offset_bytes >= 0) {
      add(flat.params_offset_bytes, DTypeSizeBytes(flat.unsharded_dtype), own);
    } else if (which == HeldSlab::kGradients && flat.gradients_offset_bytes >= 0) {
      add(flat.gradients_offset_bytes, int64_t{sizeof(float)}, own);
    } else if ((which == HeldSlab::kOptimizer || kept) && flat.optimizer_offset_bytes >= 0) {
      for (int state = 0; state < flat.optimizer_states; ++state) {
        const std::vector<FlatRange> held = short_states ? StatesOf(plan, static_cast<int>(f), state) : own;
        add((kept ? memory.shards_bytes : 0) + flat.optimizer_offset_bytes + state * flat.StateStrideBytes(),
            int64_t{sizeof(float)}, held);
      }
    }
  }
  std::sort(ranges.begin(), ranges.end(), [](const ByteRange& a, const ByteRange& b) { return a.first < b.first; });
  return Merged(
      ranges, [](const ByteRange& a, const ByteRange& b) { return a.end >= b.first; },
      [](ByteRange& a, const ByteRange& b) { a.end = std::max(a.end, b.end); });
}

int64_t HeldChunksBytes(const ShardPlan& plan, HeldSlab which) {
  int64_t chunks = 0;
  int64_t end = 0;  // of those counted so far
  for (const ByteRange& range : HeldRanges(plan, which)) {
    const int64_t first = std::max(end, range.first / kUndoChunkBytes);
    end = std::max(end, (range.end + kUndoChunkBytes - 1) / kUndoChunkBytes);
    chunks += end - first;
  }
  return chunks * kUndoChunkBytes;
}

}  // namespace shardd
