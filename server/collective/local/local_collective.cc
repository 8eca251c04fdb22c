#include "server/collective/local/local_collective.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/plan/node_part.h"
#include "common/status/status_macros.h"
#include "common/tensor/float8_blocks.h"
#include "server/collective/local/fan_out.h"
#include "server/device/device.h"

namespace shardd {
namespace {

// In an all-gather, waking a second device for less than this costs more than it saves.
constexpr int64_t kMinPieceNumel = int64_t{1} << 16;

}  // namespace

LocalCollective::LocalCollective(std::vector<Device*> devices, std::string why)
    : devices_(std::move(devices)), why_(std::move(why)) {}

std::shared_ptr<const LocalCollective::GroupSegments> LocalCollective::SegmentsOf(const ShardPlan& plan, int group,
                                                                                  int node) {
  if (!plan.digest.empty()) {
    absl::MutexLock lock(&mutex_);
    if (digest_ != plan.digest) {
      segments_.clear();
      digest_ = plan.digest;
    }
    if (const auto found = segments_.find({group, node}); found != segments_.end()) return found->second;
  }
  auto result = std::make_shared<GroupSegments>(devices_.size());
  for (int f : plan.groups[group].flat_params) {
    const FlatParamPlan& flat = plan.flat_params[f];
    // frozen
    if (flat.gradients_offset_bytes < 0 || flat.slot_offset_bytes < 0) continue;
    for (size_t rank = 0; rank < devices_.size(); ++rank) {
      for (const Segment& segment : WorkSegmentsOn(plan, f, static_cast<int>(rank), node)) {
        (*result)[rank].push_back({f, segment});
      }
    }
  }
  if (!plan.digest.empty()) {
    absl::MutexLock lock(&mutex_);
    if (digest_ == plan.digest) segments_[{group, node}] = result;
  }
  return result;
}

absl::StatusOr<std::vector<std::vector<ReduceRun>>> LocalCollective::RunsByRank(const ReduceScatterRequest& request,
                                                                                int node) {
  SHARDD_RETURN_IF_ERROR(CheckReduceScatter(request, devices_.size()));
  const std::shared_ptr<const GroupSegments> segments = SegmentsOf(*request.plan, request.group, node);
  std::vector<std::vector<ReduceRun>> runs;
  runs.reserve(devices_.size());
  for (const std::vector<RankSegment>& of_rank : *segments) runs.push_back(RunsOf(request, of_rank));
  return runs;
}

void LocalCollective::ReduceScatter(ReduceScatterRequest request, Done done) {
  std::vector<DevicePart> parts;
  const absl::StatusOr<std::vector<std::vector<ReduceRun>>> runs =
      RunsByRank(request, request.plan == nullptr ? 0 : request.plan->node);
  for (size_t rank = 0; runs.ok() && rank < devices_.size(); ++rank) {
    std::vector<DeviceOp>& ops = PartOf(parts, devices_[rank]).ops;
    if (!request.zeros.empty()) {
      std::move(request.zeros[rank].begin(), request.zeros[rank].end(), std::back_inserter(ops));
    }
    for (const ReduceRun& run : (*runs)[rank]) AddReduceOps(request, run, rank, SourcesOf(request, run), ops);
  }
  FanOut(std::move(parts), StreamId::kPostBackward, request.label, devices_.front(), runs.status(), std::move(done));
}

namespace {

// Elements [first, end) of one flat parameter, in one operation.
CastOp UnshardOp(const AllGatherRequest& request, const FlatParamPlan& flat, int64_t first, int64_t end) {
  CastOp op;
  const bool is_cast = flat.params_offset_bytes >= 0;
  op.from = is_cast ? flat.unsharded_dtype : flat.dtype;
  op.src = (is_cast ? request.parameters + flat.params_offset_bytes : request.shards + flat.shards_offset_bytes) +
           first * DTypeSizeBytes(op.from);
  op.dst = request.destination + flat.pool_offset_bytes + first * DTypeSizeBytes(flat.unsharded_dtype);
  op.to = flat.unsharded_dtype;
  op.numel = end - first;
  return op;
}

// Unshards a flat parameter, cut where another device's memory begins. Readers begin at different devices, so that not
// all read from one device at the same time.
void UnshardOnReader(const AllGatherRequest& request, const FlatParamPlan& flat, size_t ranks,
                     std::vector<DeviceOp>& ops) {
  const int64_t element_bytes = DTypeSizeBytes(flat.dtype);
  std::vector<int64_t> cuts = {0};
  const auto inside = std::upper_bound(request.boundaries.begin(), request.boundaries.end(), flat.shards_offset_bytes);
  for (auto at = inside; at != request.boundaries.end(); ++at) {
    const int64_t element = (*at - flat.shards_offset_bytes) / element_bytes;
    if (element >= flat.numel) break;
    if (element > cuts.back()) cuts.push_back(element);
  }
  const size_t begin = cuts.size() * static_cast<size_t>(request.reader) / ranks;
  cuts.push_back(flat.numel);
  const size_t parts = cuts.size() - 1;
  for (size_t i = 0; i < parts; ++i) {
    const size_t part = (begin + i) % parts;
    if (cuts[part] < cuts[part + 1]) ops.emplace_back(UnshardOp(request, flat, cuts[part], cuts[part + 1]));
  }
}

// Rounds what this node holds of a flat parameter to float8, as other nodes get it. Ranks' parts may end within blocks,
// so the devices, which all reach host memory, share the blocks out among themselves.
void AddFloat8Ops(const AllGatherRequest& request, int flat_param, const std::vector<Device*>& devices,
                  std::vector<DevicePart>& parts) {
  static_assert(kMinPieceNumel % kFloat8BlockNumel == 0);
  const FlatParamPlan& flat = request.plan->flat_params[static_cast<size_t>(flat_param)];
  size_t next = static_cast<size_t>(request.group) % devices.size();
  for (const FlatRange& range : NodeRangesByParam(*request.plan, flat_param, request.plan->node)) {
    const auto count = static_cast<int64_t>(devices.size());
    const int64_t share = (range.numel + count - 1) / count;
    const int64_t piece =
        std::max(kMinPieceNumel, (share + kFloat8BlockNumel - 1) / kFloat8BlockNumel * kFloat8BlockNumel);
    for (int64_t first = 0; first < range.numel; first += piece) {
      CastOp op = UnshardOp(request, flat, range.offset + first, range.offset + std::min(range.numel, first + piece));
      op.float8 = true;
      PartOf(parts, devices[next]).ops.emplace_back(op);
      next = (next + 1) % devices.size();
    }
  }
}

}  // namespace

void LocalCollective::AllGather(AllGatherRequest request, Done done) {
  std::vector<DevicePart> parts;
  absl::Status status = CheckGroup("all-gather", request.plan, request.group);
  const auto refuse = [&](const auto&... fact) {
    status = absl::InvalidArgumentError(
        absl::StrCat("all-gather group \"", request.plan->groups[request.group].name, "\": ", fact...));
  };
  if (status.ok() && (request.shards == nullptr || request.destination == nullptr)) refuse("null pointer");
  if (status.ok() && (request.reader < -1 || request.reader >= static_cast<int>(devices_.size()))) {
    refuse("reader is out of range (got ", request.reader, ", want -1 to ", devices_.size() - 1, ")");
  }
  if (status.ok()) {
    // Groups begin on different devices, so that small groups that are unsharded together also spread.
    size_t next = static_cast<size_t>(request.group) % devices_.size();
    for (int f : request.plan->groups[request.group].flat_params) {
      const FlatParamPlan& flat = request.plan->flat_params[f];
      if (flat.params_offset_bytes >= 0 && request.parameters == nullptr) {
        refuse("no cast parameters");
        break;
      }
      if (request.plan->cut_over_nodes) {
        continue;  // below
      }
      if (request.reader >= 0) {
        UnshardOnReader(request, flat, devices_.size(), PartOf(parts, devices_[request.reader]).ops);
        continue;
      }
      const int64_t share =
          (flat.numel + static_cast<int64_t>(devices_.size()) - 1) / static_cast<int64_t>(devices_.size());
      // Whole cache lines in either dtype, so that no two devices write one line.
      const int64_t piece = std::max(kMinPieceNumel, (share + 63) / 64 * 64);
      for (int64_t first = 0; first < flat.numel; first += piece) {
        PartOf(parts, devices_[next])
            .ops.emplace_back(UnshardOp(request, flat, first, std::min(flat.numel, first + piece)));
        next = (next + 1) % devices_.size();
      }
    }
  }
  if (status.ok() && request.plan->cut_over_nodes) {
    // Each device copies its rank's part; other nodes' parts arrive otherwise.
    for (const int f : request.plan->groups[request.group].flat_params) {
      const FlatParamPlan& flat = request.plan->flat_params[f];
      if (IsFloat8(*request.plan, f)) {
        AddFloat8Ops(request, f, devices_, parts);
        continue;
      }
      for (size_t rank = 0; rank < devices_.size(); ++rank) {
        const std::vector<Segment> segments = WorkSegments(*request.plan, f, static_cast<int>(rank));
        for (size_t i = 0; i < segments.size();) {
          const int64_t first = segments[i].offset;
          int64_t end = first;
          for (; i < segments.size() && segments[i].offset == end; ++i) end += segments[i].numel;
          PartOf(parts, devices_[rank]).ops.emplace_back(UnshardOp(request, flat, first, end));
        }
      }
    }
  }
  FanOut(std::move(parts), StreamId::kUnshard, request.label, devices_.front(), std::move(status), std::move(done));
}

}  // namespace shardd
