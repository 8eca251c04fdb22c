#include "server/collective/local/reduce_ops.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace shardd {

absl::Status CheckGroup(const char* operation, const ShardPlan* plan, int group) {
  if (plan == nullptr) return absl::InvalidArgumentError(absl::StrCat(operation, ": no plan"));
  if (group < 0 || group >= static_cast<int>(plan->groups.size())) {
    return absl::InvalidArgumentError(absl::StrCat(operation, ": group is out of range (got ", group, ", want 0 to ",
                                                   static_cast<int>(plan->groups.size()) - 1, ")"));
  }
  return absl::OkStatus();
}

absl::Status CheckReduceScatter(const ReduceScatterRequest& request, size_t ranks) {
  if (absl::Status status = CheckGroup("reduce-scatter", request.plan, request.group); !status.ok()) return status;
  const GroupPlan& group = request.plan->groups[request.group];
  const auto refuse = [&](const auto&... fact) {
    return absl::InvalidArgumentError(absl::StrCat("reduce-scatter group \"", group.name, "\": ", fact...));
  };
  if (request.plan->world_size != static_cast<int>(ranks)) {
    return refuse("plan is of another world size (got ", request.plan->world_size, ", want ", ranks, ")");
  }
  if (request.gradients == nullptr) return refuse("no gradient shards");
  const bool staged = !request.staging.empty();
  if (staged && (request.staging.size() != ranks || request.staging_bytes <= 0 || request.staging_bytes % 4096 != 0)) {
    return refuse("staging is not one for each rank, of whole pages (got ", request.staging.size(), " of ",
                  request.staging_bytes, " bytes, want ", ranks, ")");
  }
  if (staged && std::find(request.staging.begin(), request.staging.end(), nullptr) != request.staging.end()) {
    return refuse("staging is not there for every rank");
  }
  if (request.modes.size() != group.params.size()) {
    return refuse("wrong number of modes (got ", request.modes.size(), ", want ", group.params.size(), ")");
  }
  if (request.reduce_dtype != v1::DTYPE_UNSPECIFIED && !IsTrainable(request.reduce_dtype)) {
    return refuse("reduce_dtype is not served (got ", DTypeName(request.reduce_dtype), ")");
  }
  if (!request.zeros.empty() && request.zeros.size() != ranks) {
    return refuse("zeros are not of every rank (got ", request.zeros.size(), ", want ", ranks, ")");
  }
  int last_rank = -1;
  for (const GradientSource& source : request.sources) {
    if (source.rank <= last_rank || source.rank >= static_cast<int>(ranks)) {
      return refuse("sources are not ascending ranks (got ", source.rank, " after ", last_rank, ")");
    }
    last_rank = source.rank;
    if (source.slot == nullptr) return refuse("source has no slot (rank=", source.rank, ")");
    if (source.present.size() != group.params.size()) {
      return refuse("presence mask has the wrong length (got ", source.present.size(), ", want ", group.params.size(),
                    "; rank=", source.rank, ")");
    }
  }
  return absl::OkStatus();
}

std::vector<ReduceRun> RunsOf(const ReduceScatterRequest& request, const std::vector<RankSegment>& segments) {
  std::vector<ReduceRun> runs;
  std::vector<int> present;
  for (const RankSegment& item : segments) {
    const auto index = static_cast<size_t>(request.plan->params[item.segment.param].index_in_group);
    present.clear();
    for (size_t k = 0; k < request.sources.size(); ++k) {
      if (request.sources[k].present[index]) present.push_back(static_cast<int>(k));
    }
    if (present.empty() || item.segment.numel == 0) continue;
    ReduceRun* const last = runs.empty() ? nullptr : &runs.back();
    if (last != nullptr && last->flat_param == item.flat_param && last->offset + last->numel == item.segment.offset &&
        last->mode == request.modes[index] && last->sources == present) {
      last->numel += item.segment.numel;
    } else {
      runs.push_back({item.flat_param, item.segment.offset, item.segment.numel, request.modes[index], present});
    }
  }
  return runs;
}

std::vector<const void*> SourcesOf(const ReduceScatterRequest& request, const ReduceRun& run) {
  const int64_t offset = SlotOffsetBytes(*request.plan, run);
  std::vector<const void*> sources;
  sources.reserve(run.sources.size());
  for (const int k : run.sources) sources.push_back(request.sources[static_cast<size_t>(k)].slot + offset);
  return sources;
}

int64_t SlotOffsetBytes(const ShardPlan& plan, const ReduceRun& run) {
  const FlatParamPlan& flat = plan.flat_params[run.flat_param];
  return flat.slot_offset_bytes + run.offset * DTypeSizeBytes(flat.unsharded_dtype);
}

namespace {

ReduceOp SumOf(const ReduceScatterRequest& request, const ReduceRun& run, std::vector<const void*> sources) {
  const FlatParamPlan& flat = request.plan->flat_params[run.flat_param];
  ReduceOp op;
  op.sources = std::move(sources);
  op.source_dtype = flat.unsharded_dtype;
  op.reduce_dtype = request.reduce_dtype == v1::DTYPE_UNSPECIFIED ? flat.unsharded_dtype : request.reduce_dtype;
  op.keep = request.keep_low_precision ? op.reduce_dtype : flat.dtype;
  for (DType* dtype : {&op.reduce_dtype, &op.keep}) {  // sums are fp32, also for fp64 parameters
    if (*dtype == v1::DTYPE_FLOAT64) *dtype = v1::DTYPE_FLOAT32;
  }
  op.scale = request.scale;
  op.accumulate = run.mode == GradientMode::kAccumulate;
  op.dst = reinterpret_cast<float*>(request.gradients + flat.gradients_offset_bytes) + run.offset;
  op.numel = run.numel;
  return op;
}

// Copies `sum`, which belongs at `dst`, to the replicas' copies.
void AddCopies(const ShardPlan& plan, const char* sum, char* dst, int64_t numel, int first_copy,
               std::vector<DeviceOp>& ops) {
  for (int copy = first_copy; copy < plan.gradient_copies; ++copy) {
    ops.emplace_back(CopyOp{sum, dst + copy * plan.gradients_stride_bytes, numel * DTypeSizeBytes(v1::DTYPE_FLOAT32)});
  }
}

}  // namespace

void AddReduceOps(const ReduceScatterRequest& request, const ReduceRun& run, size_t rank,
                  std::vector<const void*> sources, std::vector<DeviceOp>& ops) {
  ReduceOp op = SumOf(request, run, std::move(sources));
  if (request.staging.empty()) {
    op.dst_file = request.gradients_file;
    op.dst_file_offset_bytes = reinterpret_cast<char*>(op.dst) - request.gradients;
    char* const sum = reinterpret_cast<char*>(op.dst);
    ops.push_back(std::move(op));
    AddCopies(*request.plan, sum, sum, run.numel, /*first_copy=*/1, ops);
    return;
  }
  char* const staging = request.staging[rank];
  const int64_t piece_numel = request.staging_bytes / DTypeSizeBytes(v1::DTYPE_FLOAT32);
  for (int64_t first = 0; first < run.numel; first += piece_numel) {
    ReduceOp piece = op;
    piece.numel = std::min(piece_numel, run.numel - first);
    piece.dst = reinterpret_cast<float*>(staging);
    for (const void*& source : piece.sources) {
      source = static_cast<const char*>(source) + first * DTypeSizeBytes(piece.source_dtype);
    }
    char* const dst = reinterpret_cast<char*>(op.dst + first);
    const int64_t numel = piece.numel;
    if (piece.accumulate) ops.emplace_back(CopyOp{dst, staging, numel * DTypeSizeBytes(v1::DTYPE_FLOAT32)});
    ops.emplace_back(std::move(piece));
    AddCopies(*request.plan, staging, dst, numel, /*first_copy=*/0, ops);
  }
}

}  // namespace shardd
