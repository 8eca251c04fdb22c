#include <algorithm>

#include "common/plan/layout_internal.h"

namespace shardd {
namespace plan_internal {
namespace {

struct RowRange {
  int64_t first = 0;  // elements of the parameter
  int64_t numel = 0;
};

// torch.chunk along dimension 0: chunks of ceil(rows / world) rows; the last ones may be short or empty.
RowRange ChunkOf(const ParamPlan& param, int shard_world_size, int shard) {
  const int64_t rows = param.shape.empty() ? 1 : param.shape[0];
  const int64_t row_numel = param.numel / rows;
  const int64_t chunk_rows = (rows + shard_world_size - 1) / shard_world_size;
  const int64_t first = std::min(rows, chunk_rows * shard);
  const int64_t last = std::min(rows, first + chunk_rows);
  return {first * row_numel, (last - first) * row_numel};
}

int64_t LargestShardNumel(const ShardPlan& plan, const FlatParamPlan& flat) {
  int64_t numel = 0;
  for (int p : flat.params) {
    numel += ChunkOf(plan.params[p], plan.shard_world_size, 0).numel;  // shard 0 is never the smaller one
  }
  return numel;
}

DType UnshardedDType(const v1::JobConfig& config, DType dtype) {
  const DType param_dtype = config.mixed_precision().param_dtype();
  return IsFloatingPoint(dtype) && param_dtype != v1::DTYPE_UNSPECIFIED ? param_dtype : dtype;
}

// Index of the first parameter of the flat parameter that ends beyond `offset`.
size_t FirstParamBeyond(const ShardPlan& plan, const FlatParamPlan& flat, int64_t offset) {
  const auto it = std::partition_point(flat.params.begin(), flat.params.end(),
                                       [&](int p) { return plan.params[p].offset + plan.params[p].numel <= offset; });
  return it - flat.params.begin();
}

// The pieces of [begin, end) that belong to parameters.
std::vector<Segment> SegmentsInRange(const ShardPlan& plan, const FlatParamPlan& flat, int64_t begin, int64_t end) {
  std::vector<Segment> segments;
  for (size_t i = FirstParamBeyond(plan, flat, begin); i < flat.params.size(); ++i) {
    const ParamPlan& param = plan.params[flat.params[i]];
    if (param.offset >= end) {
      break;
    }
    const int64_t first = std::max(begin, param.offset);
    const int64_t last = std::min(end, param.offset + param.numel);
    if (last > first) {
      segments.push_back({flat.params[i], first, last - first});
    }
  }
  return segments;
}

bool InRange(const ShardPlan& plan, int flat_param, int rank) {
  return flat_param >= 0 && flat_param < static_cast<int>(plan.flat_params.size()) && rank >= 0 &&
         rank < plan.world_size;
}

}  // namespace

int64_t AlignmentNumel(const FlatParamPlan& flat) {
  return kParamAlignmentBytes / std::min(DTypeSizeBytes(flat.dtype), DTypeSizeBytes(flat.unsharded_dtype));
}

void LayOutFlatParams(ShardPlan& plan) {
  plan.flat_params.reserve(plan.groups.size());
  for (size_t g = 0; g < plan.groups.size(); ++g) {
    GroupPlan& group = plan.groups[g];
    for (size_t k = 0; k < group.params.size(); ++k) {
      ParamPlan& param = plan.params[group.params[k]];
      // Few kinds per group (dtypes x 2), so a scan beats a map.
      const auto found = std::find_if(group.flat_params.begin(), group.flat_params.end(), [&](int f) {
        return plan.flat_params[f].dtype == param.dtype && plan.flat_params[f].requires_grad == param.requires_grad;
      });
      if (found == group.flat_params.end()) {
        param.flat_param = static_cast<int>(plan.flat_params.size());
        group.flat_params.push_back(param.flat_param);
        FlatParamPlan flat;
        flat.group = static_cast<int>(g);
        flat.dtype = param.dtype;
        flat.unsharded_dtype = UnshardedDType(plan.config, param.dtype);
        flat.requires_grad = param.requires_grad;
        plan.flat_params.push_back(std::move(flat));
      } else {
        param.flat_param = *found;
      }
      FlatParamPlan& flat = plan.flat_params[param.flat_param];
      param.group = static_cast<int>(g);
      param.index_in_group = static_cast<int>(k);
      param.offset = RoundUp(flat.numel, AlignmentNumel(flat));
      flat.numel = param.offset + param.numel;
      flat.params.push_back(group.params[k]);
      group.numel += param.numel;
    }
  }
  const bool is_dim0 = plan.config.layout() == v1::LAYOUT_DIM0;
  for (FlatParamPlan& flat : plan.flat_params) {
    if (is_dim0) {
      flat.padded_numel = flat.numel;
      flat.shard_numel = LargestShardNumel(plan, flat);
    } else {
      flat.padded_numel = RoundUp(flat.numel, plan.shard_world_size * AlignmentNumel(flat));
      flat.shard_numel = flat.padded_numel / plan.shard_world_size;
    }
  }
}

}  // namespace plan_internal

using plan_internal::ChunkOf;
using plan_internal::InRange;
using plan_internal::SegmentsInRange;

std::vector<Segment> RankSegments(const ShardPlan& plan, int flat_param, int rank) {
  if (!InRange(plan, flat_param, rank)) {
    return {};
  }
  const FlatParamPlan& flat = plan.flat_params[flat_param];
  if (plan.shard_world_size == 1) {
    return SegmentsInRange(plan, flat, 0, flat.numel);
  }
  if (plan.config.layout() != v1::LAYOUT_DIM0) {
    return SegmentsInRange(plan, flat, rank * flat.shard_numel, (rank + 1) * flat.shard_numel);
  }
  std::vector<Segment> segments;
  for (int p : flat.params) {
    const auto chunk = ChunkOf(plan.params[p], plan.shard_world_size, rank);
    if (chunk.numel > 0) {
      segments.push_back({p, plan.params[p].offset + chunk.first, chunk.numel});
    }
  }
  return segments;
}

std::vector<Segment> WorkSegments(const ShardPlan& plan, int flat_param, int rank) {
  if (!InRange(plan, flat_param, rank)) {
    return {};
  }
  if (plan.shard_world_size == plan.world_size) {
    return RankSegments(plan, flat_param, rank);
  }
  const FlatParamPlan& flat = plan.flat_params[flat_param];
  const int64_t unit = plan_internal::AlignmentNumel(flat);
  const int64_t units = (flat.numel + unit - 1) / unit;
  const int64_t begin = units * rank / plan.world_size * unit;
  const int64_t end = units * (rank + 1) / plan.world_size * unit;
  return SegmentsInRange(plan, flat, begin, end);
}

int ShardPlan::ParamAt(int flat_param, int64_t offset) const {
  if (flat_param < 0 || flat_param >= static_cast<int>(flat_params.size()) || offset < 0) {
    return -1;
  }
  const FlatParamPlan& flat = flat_params[flat_param];
  const size_t i = plan_internal::FirstParamBeyond(*this, flat, offset);
  if (i == flat.params.size() || params[flat.params[i]].offset > offset) {
    return -1;
  }
  return flat.params[i];
}

}  // namespace shardd
