#include "server/collective/nccl/nccl_collective.h"

#include <thread>
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

NcclCollective::NcclCollective(std::vector<Device*> devices, std::shared_ptr<Communicator> communicator, Remake remake)
    : devices_(devices), remake_(std::move(remake)), local_(std::move(devices)) {
  absl::MutexLock lock(&current_->mutex);
  current_->communicator = std::move(communicator);
}

std::string NcclCollective::Describe() const {
  absl::MutexLock lock(&current_->mutex);
  const Communicator& communicator = *current_->communicator;
  const absl::Status broken = communicator.broken();
  std::string text =
      absl::StrCat(communicator.name(), ": ", by_nccl_.load(), " gradient elements summed by it, ", by_copies_.load(),
                   " by copies, because they are not reduced in fp32 or not every rank has submitted them; ",
                   communicator.details());
  if (current_->made_anew > 0) {
    absl::StrAppend(&text, "; aborted and made anew ", current_->made_anew, " time(s), last because ", current_->why);
  }
  if (!broken.ok()) {
    const bool may_come = remake_ != nullptr && !current_->is_given_up;
    absl::StrAppend(&text, "; all by copies ", may_come ? "until it is made anew" : "from now on", ": ",
                    current_->is_given_up ? current_->why : broken.message());
  }
  return text;
}

std::shared_ptr<Communicator> NcclCollective::Usable() {
  absl::MutexLock lock(&current_->mutex);
  const absl::Status broken = current_->communicator->broken();
  if (broken.ok()) return current_->communicator;
  if (remake_ == nullptr || current_->is_given_up || current_->is_making) return nullptr;
  if (current_->made_anew == kMostRemakes) {
    current_->is_given_up = true;
    current_->why = absl::StrCat(broken.message(), "; it broke after it was made anew ", kMostRemakes, " times");
    return nullptr;
  }
  current_->is_making = true;
  std::thread([current = current_, remake = remake_, why = std::string(broken.message())] {
    absl::StatusOr<std::shared_ptr<Communicator>> made = remake();
    absl::MutexLock made_lock(&current->mutex);
    current->is_making = false;
    if (!made.ok()) {
      current->is_given_up = true;
      current->why = absl::StrCat(why, "; it cannot be made anew: ", made.status().message());
      return;
    }
    current->communicator = *std::move(made);
    ++current->made_anew;
    current->why = why;
  }).detach();
  return nullptr;
}

void NcclCollective::ReduceScatter(ReduceScatterRequest request, Done done) {
  const absl::StatusOr<std::vector<std::vector<ReduceRun>>> runs = local_.RunsByRank(request);
  const std::shared_ptr<Communicator> communicator = runs.ok() ? Usable() : nullptr;
  if (communicator == nullptr) {
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
      sum.communicator = communicator.get();
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
      [keep = communicator, done = std::move(done)](absl::Status status) { done(std::move(status)); },
      [communicator](const absl::Status& why) { communicator->Break(why); });
}

}  // namespace shardd
