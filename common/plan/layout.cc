#include <algorithm>
#include <map>

#include "common/plan/layout_internal.h"
#include "common/plan/whole_params.h"

namespace shardd {
namespace plan_internal {
namespace {

struct RowRange {
  int64_t first = 0;
  int64_t end = 0;
};

// As torch.chunk: chunks of ceil(rows / chunks) rows; the last ones may be short or empty.
RowRange ChunkOf(RowRange rows, int chunks, int chunk) {
  const int64_t size = (rows.end - rows.first + chunks - 1) / chunks;
  const int64_t first = std::min(rows.end, rows.first + size * chunk);
  return {first, std::min(rows.end, first + size)};
}

// Elements of a parameter.
struct ElementRange {
  int64_t first = 0;
  int64_t numel = 0;
};

// Piece `piece` of `pieces`, of which a whole matrix is in one. DIM0: if cut over the world, the rows of a shard are
// chunked once more over the replicas. REQUIRES: FLAT: padded_numel is known.
ElementRange PieceOfParam(const ShardPlan& plan, int index, int pieces, int piece) {
  const Placement& placement = plan.placement;
  const ParamPlan& param = plan.params[index];
  if (const int place = PlaceOfWhole(plan, index); place >= 0) {
    return {0, piece == placement.shard_index[place] ? param.numel : 0};
  }
  if (plan.config.layout() != v1::LAYOUT_DIM0) {
    const int64_t numel = plan.flat_params[param.flat_param].padded_numel / pieces;
    const int64_t first = std::clamp<int64_t>(piece * numel - param.offset, 0, param.numel);
    const int64_t end = std::clamp<int64_t>((piece + 1) * numel - param.offset, 0, param.numel);
    return {first, end - first};
  }
  RowRange rows = {0, param.shape.empty() ? 1 : param.shape[0]};
  const int64_t row_numel = param.numel / rows.end;
  if (pieces == placement.shard_world_size) {
    rows = ChunkOf(rows, pieces, piece);
  } else if (pieces > 1) {
    rows = ChunkOf(rows, placement.shard_world_size, piece / placement.replicas);
    rows = ChunkOf(rows, placement.replicas, piece % placement.replicas);
  }
  return {rows.first * row_numel, (rows.end - rows.first) * row_numel};
}

// The most that a place has whole.
int64_t LargestWholeNumel(const ShardPlan& plan, const FlatParamPlan& flat) {
  std::map<int, int64_t> by_place;
  int64_t most = 0;
  for (int p : flat.params) {
    const int place = PlaceOfWhole(plan, p);
    if (place >= 0) most = std::max(most, by_place[place] += plan.params[p].numel);
  }
  return most;
}

// DIM0: the largest piece of what is cut.
int64_t LargestCutNumel(const ShardPlan& plan, const FlatParamPlan& flat) {
  int64_t numel = 0;
  for (int p : flat.params) {  // piece 0 is never the smallest
    if (PlaceOfWhole(plan, p) >= 0) continue;
    numel += PieceOfParam(plan, p, plan.placement.pieces(Purpose::kParameters), 0).numel;
  }
  return numel;
}

DType UnshardedDType(const GroupPlan& group, DType dtype) {
  const DType param_dtype = group.mixed_precision.param_dtype();
  return IsFloatingPoint(dtype) && param_dtype != v1::DTYPE_UNSPECIFIED ? param_dtype : dtype;
}

// Index of the first parameter of the flat parameter that ends beyond `offset`.
size_t FirstParamBeyond(const ShardPlan& plan, const FlatParamPlan& flat, int64_t offset) {
  const auto it = std::partition_point(flat.params.begin(), flat.params.end(),
                                       [&](int p) { return plan.params[p].offset + plan.params[p].numel <= offset; });
  return it - flat.params.begin();
}

// The parts of [begin, end) that belong to parameters.
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

bool HasWhole(const ShardPlan& plan, const FlatParamPlan& flat) {
  return plan.cut_over_nodes && std::any_of(flat.params.begin(), flat.params.end(),
                                            [&plan](int param) { return PlaceOfWhole(plan, param) >= 0; });
}

int64_t AlignmentNumel(const FlatParamPlan& flat) {
  return kParamAlignmentBytes / std::min(DTypeSizeBytes(flat.dtype), DTypeSizeBytes(flat.unsharded_dtype));
}

Purpose WritersPurpose(const ShardPlan& plan) {
  return plan.config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER ? Purpose::kOptimizer : Purpose::kParameters;
}

void LayOutFlatParams(ShardPlan& plan) {
  plan.flat_params.reserve(plan.groups.size());
  for (size_t g = 0; g < plan.groups.size(); ++g) {
    GroupPlan& group = plan.groups[g];
    for (size_t k = 0; k < group.params.size(); ++k) {
      ParamPlan& param = plan.params[group.params[k]];
      // A group has few kinds (dtypes x 2), so a scan beats a map.
      const auto found = std::find_if(group.flat_params.begin(), group.flat_params.end(), [&](int f) {
        return plan.flat_params[f].dtype == param.dtype && plan.flat_params[f].requires_grad == param.requires_grad;
      });
      if (found == group.flat_params.end()) {
        param.flat_param = static_cast<int>(plan.flat_params.size());
        group.flat_params.push_back(param.flat_param);
        FlatParamPlan flat;
        flat.group = static_cast<int>(g);
        flat.dtype = param.dtype;
        flat.unsharded_dtype = UnshardedDType(group, param.dtype);
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
      flat.shard_numel = LargestCutNumel(plan, flat);
    } else {
      // Equal pieces of the kind that is cut most finely.
      flat.padded_numel = RoundUp(flat.numel, plan.placement.pieces(Purpose::kOptimizer) * AlignmentNumel(flat));
      flat.shard_numel = flat.padded_numel / plan.placement.pieces(Purpose::kParameters);
    }
    flat.shard_numel += LargestWholeNumel(plan, flat);
  }
}

}  // namespace plan_internal

using plan_internal::ElementRange;
using plan_internal::InRange;
using plan_internal::PieceOfParam;
using plan_internal::SegmentsInRange;

namespace {

// Whether the rank is the first holder: of all ranks, or within its replica if replicas have copies.
bool IsFirstInCopy(const ShardPlan& plan, Purpose purpose, int copies, int rank) {
  if (copies == 1) {
    return plan.placement.IsFirstHolder(purpose, plan.PlaceOf(rank));
  }
  return plan.placement.pieces(purpose) > 1 || plan.placement.shard_index[plan.PlaceOf(rank)] == 0;
}

bool MayWrite(const ShardPlan& plan, int rank) {
  return IsFirstInCopy(plan, plan_internal::WritersPurpose(plan), plan.shard_copies, rank);
}

// Piece `piece` of `pieces` of a flat parameter.
std::vector<Segment> PieceSegments(const ShardPlan& plan, const FlatParamPlan& flat, int pieces, int piece) {
  if (pieces == 1) {
    return SegmentsInRange(plan, flat, 0, flat.numel);
  }
  if (plan.config.layout() != v1::LAYOUT_DIM0 && !plan_internal::HasWhole(plan, flat)) {
    const int64_t numel = flat.padded_numel / pieces;
    return SegmentsInRange(plan, flat, piece * numel, (piece + 1) * numel);
  }
  std::vector<Segment> segments;
  for (int p : flat.params) {
    const ElementRange range = PieceOfParam(plan, p, pieces, piece);
    if (range.numel > 0) {
      segments.push_back({p, plan.params[p].offset + range.first, range.numel});
    }
  }
  return segments;
}

// Part `part` of `parts` of the elements in the spans [first, second), cut between units of the flat parameter.
std::vector<Segment> EvenPart(const ShardPlan& plan, const FlatParamPlan& flat,
                              const std::vector<std::pair<int64_t, int64_t>>& spans, int parts, int part) {
  const int64_t unit = plan_internal::AlignmentNumel(flat);
  int64_t units = 0;
  for (const auto& [first, end] : spans) {
    units += (end - first + unit - 1) / unit;
  }
  int64_t begin = units * part / parts;
  int64_t left = units * (part + 1) / parts - begin;
  std::vector<Segment> segments;
  for (const auto& [first, end] : spans) {
    const int64_t span_units = (end - first + unit - 1) / unit;
    const int64_t skipped = std::min(begin, span_units);
    const int64_t taken = std::min(left, span_units - skipped);
    begin -= skipped;
    left -= taken;
    const auto piece =
        SegmentsInRange(plan, flat, first + skipped * unit, std::min(end, first + (skipped + taken) * unit));
    segments.insert(segments.end(), piece.begin(), piece.end());
  }
  return segments;
}

}  // namespace

std::vector<Segment> plan_internal::PlaceSegments(const ShardPlan& plan, int flat_param, int place) {
  if (flat_param < 0 || flat_param >= static_cast<int>(plan.flat_params.size()) || place < 0 ||
      place >= plan_internal::Places(plan)) {
    return {};
  }
  return PieceSegments(plan, plan.flat_params[flat_param], plan_internal::Places(plan),
                       plan.placement.shard_index[static_cast<size_t>(place)]);
}

std::vector<Segment> OwnedSegments(const ShardPlan& plan, Purpose purpose, int flat_param, int rank) {
  if (!InRange(plan, flat_param, rank)) {
    return {};
  }
  return PieceSegments(plan, plan.flat_params[flat_param], plan.placement.pieces(purpose),
                       plan.placement.PieceOf(purpose, plan.PlaceOf(rank)));
}

std::vector<Segment> RankSegments(const ShardPlan& plan, int flat_param, int rank) {
  return OwnedSegments(plan, Purpose::kParameters, flat_param, rank);
}

std::vector<Segment> WriteSegments(const ShardPlan& plan, int flat_param, int rank) {
  if (!InRange(plan, flat_param, rank) || !MayWrite(plan, rank)) {
    return {};
  }
  return OwnedSegments(plan, plan_internal::WritersPurpose(plan), flat_param, rank);
}

ParamRange WriteRange(const ShardPlan& plan, int param, int rank) {
  return MayWrite(plan, rank) ? OwnedRange(plan, plan_internal::WritersPurpose(plan), param, rank) : ParamRange();
}

ParamRange GradientWriteRange(const ShardPlan& plan, int param, int rank) {
  return IsFirstInCopy(plan, Purpose::kGradients, plan.gradient_copies, rank)
             ? OwnedRange(plan, Purpose::kGradients, param, rank)
             : ParamRange();
}

std::vector<Segment> WorkSegments(const ShardPlan& plan, int flat_param, int rank) {
  if (!InRange(plan, flat_param, rank)) {
    return {};
  }
  const FlatParamPlan& flat = plan.flat_params[flat_param];
  // If nothing is cut over the shard groups, the parts need not end where their shards do.
  const int shards = plan.placement.pieces(Purpose::kOptimizer) == 1 ? 1 : plan.placement.shard_world_size;
  const int place = plan.PlaceOf(rank);
  if (shards == plan_internal::Places(plan)) {
    return PieceSegments(plan, flat, shards, plan.placement.shard_index[place]);
  }
  const int parts = plan_internal::Places(plan) / shards;
  const int work = plan.placement.shard_index[place] * plan.placement.replicas + plan.placement.replica_index[place];
  const int shard = work / parts;
  std::vector<std::pair<int64_t, int64_t>> spans;
  if (shards == 1 || plan.config.layout() != v1::LAYOUT_DIM0) {
    const int64_t numel = flat.padded_numel / shards;
    spans.emplace_back(std::min(flat.numel, shard * numel), std::min(flat.numel, (shard + 1) * numel));
  } else {
    for (const Segment& segment : PieceSegments(plan, flat, shards, shard)) {
      spans.emplace_back(segment.offset, segment.offset + segment.numel);
    }
  }
  return EvenPart(plan, flat, spans, parts, work % parts);
}

ParamRange OwnedRange(const ShardPlan& plan, Purpose purpose, int param, int rank) {
  return plan_internal::PlaceRange(plan, purpose, param, plan.PlaceOf(rank));
}

ParamRange plan_internal::PlaceRange(const ShardPlan& plan, Purpose purpose, int param, int place) {
  const ParamPlan& of = plan.params[param];
  const int pieces = plan.placement.pieces(purpose);
  const int piece = plan.placement.PieceOf(purpose, place);
  if (pieces == 1) {
    return {0, of.numel};
  }
  const ElementRange range = PieceOfParam(plan, param, pieces, piece);
  return {range.first, range.numel};
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
