#include "server/collective/nccl/nccl_collective.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/collective/local/fan_out.h"

namespace shardd {
namespace {

// NCCL's share of a request: the runs that are summed there, each with the rank whose part it is.
struct Summed {
  std::vector<std::pair<ReduceRun, int>> runs;
  int64_t numel = 0;
};

// A sum of a lower dtype would be rounded at every hop of the ring; and what is rounded to one before it is added, only
// local/'s kernel does so.
bool TakesDType(const ReduceScatterRequest& request, const ReduceRun& run) {
  return request.plan->flat_params[run.flat_param].unsharded_dtype == v1::DTYPE_FLOAT32 &&
         (request.reduce_dtype == v1::DTYPE_UNSPECIFIED || request.reduce_dtype == v1::DTYPE_FLOAT32);
}

float* InSlot(const ReduceScatterRequest& request, const ReduceRun& run, size_t rank) {
  return reinterpret_cast<float*>(request.sources[rank].slot + SlotOffsetBytes(*request.plan, run));
}

// One part per rank, equal, and one behind the other: NCCL has one operation for that.
bool Scatters(const ReduceScatterRequest& request, const Summed& summed, size_t ranks) {
  if (summed.runs.size() != ranks) return false;
  const ReduceRun& first = summed.runs.front().first;
  for (size_t rank = 0; rank < ranks; ++rank) {
    const auto& [run, root] = summed.runs[rank];
    if (root != static_cast<int>(rank) || run.numel != first.numel ||
        SlotOffsetBytes(*request.plan, run) !=
            SlotOffsetBytes(*request.plan, first) + static_cast<int64_t>(rank * sizeof(float)) * first.numel) {
      return false;
    }
  }
  return true;
}

}  // namespace

NcclCollective::NcclCollective(std::vector<Device*> devices, std::shared_ptr<Communicator> communicator)
    : devices_(devices), communicator_(std::move(communicator)), local_(std::move(devices)) {}

std::string NcclCollective::Describe() const {
  const absl::Status broken = communicator_->broken();
  return absl::StrCat(communicator_->name(), ": ", by_nccl_.load(), " gradient elements summed by it, ",
                      by_copies_.load(),
                      " by copies, because they are not reduced in fp32 or not every rank has submitted them",
                      broken.ok() ? "" : absl::StrCat("; all by copies from now on: ", broken.message()));
}

void NcclCollective::ReduceScatter(ReduceScatterRequest request, Done done) {
  const absl::StatusOr<std::vector<std::vector<ReduceRun>>> runs = local_.RunsByRank(request);
  if (!runs.ok() || !communicator_->broken().ok()) {
    local_.ReduceScatter(std::move(request), std::move(done));
    return;
  }
  const size_t ranks = devices_.size();
  Summed summed;
  std::vector<std::vector<DeviceOp>> own(ranks);  // of each rank's part, behind the sum
  for (size_t rank = 0; rank < ranks; ++rank) {
    for (const ReduceRun& run : (*runs)[rank]) {
      if (run.sources.size() == ranks && TakesDType(request, run)) {
        AddReduceOps(request, run, rank, {InSlot(request, run, rank)}, own[rank]);
        summed.runs.emplace_back(run, static_cast<int>(rank));
        summed.numel += run.numel;
      } else {
        AddReduceOps(request, run, rank, SourcesOf(request, run), own[rank]);
        by_copies_ += static_cast<uint64_t>(run.numel);
      }
    }
  }
  by_nccl_ += static_cast<uint64_t>(summed.numel);
  std::vector<DevicePart> parts;
  for (size_t rank = 0; rank < ranks; ++rank) {
    std::vector<DeviceOp> ops;
    if (!summed.runs.empty()) {
      SumOp sum;
      sum.communicator = communicator_.get();
      sum.member = static_cast<int>(rank);
      sum.scatter = Scatters(request, summed, ranks);
      sum.numel = summed.numel;
      for (const auto& [run, root] : summed.runs) {
        float* const slot = InSlot(request, run, rank);
        sum.parts.push_back({slot, slot, run.numel, root});
      }
      ops.emplace_back(std::move(sum));
    }
    std::move(own[rank].begin(), own[rank].end(), std::back_inserter(ops));
    parts.push_back({devices_[rank], std::move(ops)});
  }
  // The communicator lives as long as what names it.
  FanOut(
      std::move(parts), StreamId::kPostBackward, request.label, devices_.front(), absl::OkStatus(),
      [keep = communicator_, done = std::move(done)](absl::Status status) { done(std::move(status)); },
      [communicator = communicator_](const absl::Status& why) { communicator->Break(why); });
}

}  // namespace shardd
