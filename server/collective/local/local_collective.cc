#include "server/collective/local/local_collective.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/collective/local/fan_out.h"

namespace shardd {
namespace {

// Of an all-gather: below this a second device's wake-up costs more than it saves.
constexpr int64_t kMinPieceNumel = int64_t{1} << 16;

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
  if (request.modes.size() != group.params.size()) {
    return refuse("wrong number of modes (got ", request.modes.size(), ", want ", group.params.size(), ")");
  }
  if (request.reduce_dtype != v1::DTYPE_UNSPECIFIED && !IsTrainable(request.reduce_dtype)) {
    return refuse("reduce_dtype is not served (got ", DTypeName(request.reduce_dtype), ")");
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

// Sources with a gradient for parameter `index` of the group, as positions in request.sources.
void PresentSources(const ReduceScatterRequest& request, int index, std::vector<int>& result) {
  result.clear();
  for (size_t k = 0; k < request.sources.size(); ++k) {
    if (request.sources[k].present[index]) result.push_back(static_cast<int>(k));
  }
}

// A range under construction: segments that touch and are treated alike become one operation.
struct Run {
  int flat_param = -1;
  int64_t offset = 0;
  int64_t numel = 0;
  GradientMode mode = GradientMode::kOverwrite;
  std::vector<int> sources;
};

ReduceOp MakeReduceOp(const ReduceScatterRequest& request, const Run& run) {
  const FlatParamPlan& flat = request.plan->flat_params[run.flat_param];
  const int64_t slot_offset = flat.slot_offset_bytes + run.offset * DTypeSizeBytes(flat.unsharded_dtype);
  ReduceOp op;
  op.sources.reserve(run.sources.size());
  for (int k : run.sources) op.sources.push_back(request.sources[k].slot + slot_offset);
  op.source_dtype = flat.unsharded_dtype;
  op.reduce_dtype = request.reduce_dtype == v1::DTYPE_UNSPECIFIED ? flat.unsharded_dtype : request.reduce_dtype;
  op.keep = request.keep_low_precision ? op.reduce_dtype : flat.dtype;
  op.scale = request.scale;
  op.accumulate = run.mode == GradientMode::kAccumulate;
  op.dst = reinterpret_cast<float*>(request.gradients + flat.gradients_offset_bytes) + run.offset;
  op.numel = run.numel;
  op.dst_file = request.gradients_file;
  op.dst_file_offset_bytes = reinterpret_cast<char*>(op.dst) - request.gradients;
  return op;
}

// Replicas that have gradient shards of their own get the sum as soon as it is there, from the same device.
void CopyToReplicas(const ShardPlan& plan, const Run& run, char* gradients, std::vector<DeviceOp>& ops) {
  char* const sum = gradients + plan.flat_params[run.flat_param].gradients_offset_bytes +
                    run.offset * DTypeSizeBytes(v1::DTYPE_FLOAT32);
  for (int copy = 1; copy < plan.gradient_copies; ++copy) {
    ops.push_back(CopyOp{sum, sum + copy * plan.gradients_stride_bytes, run.numel * DTypeSizeBytes(v1::DTYPE_FLOAT32)});
  }
}

}  // namespace

LocalCollective::LocalCollective(std::vector<Device*> devices) : devices_(std::move(devices)) {}

std::shared_ptr<const LocalCollective::GroupSegments> LocalCollective::SegmentsOf(const ShardPlan& plan, int group) {
  if (!plan.digest.empty()) {
    absl::MutexLock lock(&mutex_);
    if (digest_ != plan.digest) {
      segments_.clear();
      digest_ = plan.digest;
    }
    if (const auto found = segments_.find(group); found != segments_.end()) return found->second;
  }
  auto result = std::make_shared<GroupSegments>(devices_.size());
  for (int f : plan.groups[group].flat_params) {
    const FlatParamPlan& flat = plan.flat_params[f];
    if (flat.gradients_offset_bytes < 0 || flat.slot_offset_bytes < 0) continue;  // frozen
    for (size_t rank = 0; rank < devices_.size(); ++rank) {
      for (const Segment& segment : WorkSegments(plan, f, static_cast<int>(rank))) {
        (*result)[rank].push_back({f, segment});
      }
    }
  }
  if (!plan.digest.empty()) {
    absl::MutexLock lock(&mutex_);
    if (digest_ == plan.digest) segments_[group] = result;
  }
  return result;
}

void LocalCollective::ReduceScatter(ReduceScatterRequest request, Done done) {
  std::vector<DevicePart> parts;
  const absl::Status status = CheckReduceScatter(request, devices_.size());
  if (status.ok()) {
    const std::shared_ptr<const GroupSegments> segments = SegmentsOf(*request.plan, request.group);
    std::vector<int> present;
    for (size_t rank = 0; rank < devices_.size(); ++rank) {
      std::vector<DeviceOp>& ops = PartOf(parts, devices_[rank]).ops;
      Run run;
      const auto flush = [&] {
        if (run.numel > 0) {
          ops.push_back(MakeReduceOp(request, run));
          CopyToReplicas(*request.plan, run, request.gradients, ops);
        }
        run.numel = 0;
      };
      for (const RankSegment& item : (*segments)[rank]) {
        const int index = request.plan->params[item.segment.param].index_in_group;
        PresentSources(request, index, present);
        if (present.empty()) continue;
        const bool joins = run.numel > 0 && run.flat_param == item.flat_param &&
                           run.offset + run.numel == item.segment.offset && run.mode == request.modes[index] &&
                           run.sources == present;
        if (joins) {
          run.numel += item.segment.numel;
          continue;
        }
        flush();
        run = {item.flat_param, item.segment.offset, item.segment.numel, request.modes[index], present};
      }
      flush();
    }
  }
  FanOut(std::move(parts), StreamId::kPostBackward, request.label, devices_.front(), status, std::move(done));
}

void LocalCollective::AllGather(AllGatherRequest request, Done done) {
  std::vector<DevicePart> parts;
  absl::Status status = CheckGroup("all-gather", request.plan, request.group);
  if (status.ok() && (request.shards == nullptr || request.destination == nullptr)) {
    status = absl::InvalidArgumentError(
        absl::StrCat("all-gather group \"", request.plan->groups[request.group].name, "\": null pointer"));
  }
  if (status.ok()) {
    // Groups begin on different devices, so that small ones that are unsharded together spread too.
    size_t next = static_cast<size_t>(request.group) % devices_.size();
    for (int f : request.plan->groups[request.group].flat_params) {
      const FlatParamPlan& flat = request.plan->flat_params[f];
      const int64_t share =
          (flat.numel + static_cast<int64_t>(devices_.size()) - 1) / static_cast<int64_t>(devices_.size());
      // Whole cache lines of either dtype, so that no two devices write one line.
      const int64_t piece = std::max(kMinPieceNumel, (share + 63) / 64 * 64);
      for (int64_t first = 0; first < flat.numel; first += piece) {
        CastOp op;
        op.src = request.shards + flat.shards_offset_bytes + first * DTypeSizeBytes(flat.dtype);
        op.from = flat.dtype;
        op.dst = request.destination + flat.pool_offset_bytes + first * DTypeSizeBytes(flat.unsharded_dtype);
        op.to = flat.unsharded_dtype;
        op.numel = std::min(piece, flat.numel - first);
        PartOf(parts, devices_[next]).ops.emplace_back(op);
        next = (next + 1) % devices_.size();
      }
    }
  }
  FanOut(std::move(parts), StreamId::kUnshard, request.label, devices_.front(), std::move(status), std::move(done));
}

}  // namespace shardd
