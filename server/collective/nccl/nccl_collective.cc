#include "server/collective/nccl/nccl_collective.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/container/btree_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/collective/local/fan_out.h"
#include "server/device/device_memory.h"

namespace shardd {
namespace {

// NCCL's part of a request: the runs that it sums, by the rank that works on them.
struct Summed {
  std::vector<std::pair<ReduceRun, int>> runs;
  absl::btree_set<int> copied;  // flat parameters of which copies add some part
  int64_t numel = 0;
};

// A lower dtype would be rounded at every hop of the ring; and only local/'s kernel rounds to a lower dtype before
// adding.
bool TakesDType(const ReduceScatterRequest& request, const ReduceRun& run) {
  return request.plan->flat_params[run.flat_param].unsharded_dtype == v1::DTYPE_FLOAT32 &&
         (request.reduce_dtype == v1::DTYPE_UNSPECIFIED || request.reduce_dtype == v1::DTYPE_FLOAT32);
}

float* InSlot(const ReduceScatterRequest& request, const ReduceRun& run, size_t rank) {
  return reinterpret_cast<float*>(request.sources[rank].slot + SlotOffsetBytes(*request.plan, run));
}

// A range that NCCL sums over every rank's slot, in the slot's order.
struct SlotPart {
  int64_t offset_bytes = 0;
  int64_t numel = 0;
  int root = 0;
};

// A flat parameter that is cut into as many equal pieces as ranks, each with the rank's own runs, is summed as a whole:
// NCCL has one operation for that. Gaps between the runs (padding, and what no rank has) go along into the slot of
// their root, where nobody reads them. Otherwise every run is a part.
std::vector<SlotPart> PartsOf(const ShardPlan& plan, const Summed& summed, int ranks) {
  absl::btree_map<int, std::vector<const std::pair<ReduceRun, int>*>> by_flat_param;
  for (const auto& item : summed.runs) by_flat_param[item.first.flat_param].push_back(&item);
  std::vector<SlotPart> parts;
  for (const auto& [index, runs] : by_flat_param) {
    const FlatParamPlan& flat = plan.flat_params[static_cast<size_t>(index)];
    const int64_t piece_numel = flat.padded_numel / ranks;
    const bool whole = flat.padded_numel % ranks == 0 && !summed.copied.contains(index) &&
                       std::all_of(runs.begin(), runs.end(), [piece_numel](const auto* item) {
                         const auto& [run, root] = *item;
                         return run.offset >= root * piece_numel && run.offset + run.numel <= (root + 1) * piece_numel;
                       });
    for (int root = 0; whole && root < ranks; ++root) {
      parts.push_back(
          {flat.slot_offset_bytes + root * piece_numel * DTypeSizeBytes(v1::DTYPE_FLOAT32), piece_numel, root});
    }
    for (const auto* item : runs) {
      if (!whole) parts.push_back({SlotOffsetBytes(plan, item->first), item->first.numel, item->second});
    }
  }
  std::sort(parts.begin(), parts.end(),
            [](const SlotPart& a, const SlotPart& b) { return a.offset_bytes < b.offset_bytes; });
  return parts;
}

}  // namespace

NcclCollective::NcclCollective(std::vector<Device*> devices, std::shared_ptr<NcclCommunicator> communicator,
                               Remake remake)
    : devices_(devices),
      remake_(std::move(remake)),
      local_(std::move(devices)),
      windows_(communicator->takes_window()
                   ? std::make_shared<NcclWindows>(
                         communicator, [current = current_, make = remake_] { return Replace(*current, make); })
                   : nullptr) {
  absl::MutexLock lock(&current_->mutex);
  current_->communicator = std::move(communicator);
}

NcclCollective::~NcclCollective() {
  if (windows_ != nullptr) windows_->Stop();
}

std::shared_ptr<NcclCommunicator> NcclCollective::Replace(Current& current, const Remake& remake) {
  if (remake == nullptr) return nullptr;
  absl::StatusOr<std::shared_ptr<NcclCommunicator>> made = remake();
  absl::MutexLock lock(&current.mutex);
  if (current.communicator->broken().ok()) return nullptr;
  if (!made.ok()) {
    current.is_given_up = true;
    current.why = absl::StrCat("it cannot be made without a window: ", made.status().message());
    return nullptr;
  }
  current.communicator = *made;
  return *std::move(made);
}

void NcclCollective::SetSlots(int rank, std::shared_ptr<const DeviceSlab> slots) {
  if (windows_ != nullptr) windows_->SetSlots(rank, std::move(slots));
}

std::string NcclCollective::Describe() const {
  absl::MutexLock lock(&current_->mutex);
  const Communicator& communicator = *current_->communicator;
  const absl::Status broken = communicator.broken();
  std::string text = absl::StrCat(
      communicator.name(), ": ", by_nccl_.load(), " gradient elements summed by it, ", by_copies_.load(),
      " by copies, because they are not reduced in fp32 or not every rank has submitted them; ", communicator.details(),
      "; ", windows_ != nullptr ? windows_->Describe() : "symmetric windows are off", DescribePaths());
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

void NcclCollective::Note(const ReduceScatterRequest& request, const SumOp& sum) {
  Path path;
  path.parts = sum.parts.size();
  for (size_t i = 0; i < sum.parts.size();) {
    const bool scatters = ScattersAt(sum, i);
    path.rooted += scatters ? 0 : 1;
    i += scatters ? devices_.size() : 1;
  }
  path.in_window = windows_ != nullptr && windows_->registered() && path.rooted < path.parts;
  absl::MutexLock lock(&paths_mutex_);
  paths_[request.plan->groups[static_cast<size_t>(request.group)].name] = path;
}

std::string NcclCollective::DescribePaths() const {
  constexpr size_t kMostNames = 8;
  std::vector<std::string> inside, outside, copied;
  absl::MutexLock lock(&paths_mutex_);
  for (const auto& [name, path] : paths_) {
    std::string rooted;
    if (path.rooted > 0) {
      rooted =
          absl::StrCat(path.rooted, " of ", path.parts, " parts are not equal ones of all ranks, one behind the other");
    }
    (path.parts == 0  ? copied
     : path.in_window ? inside
                      : outside)
        .push_back(absl::StrCat("\"", name, "\"", rooted.empty() ? "" : " (", rooted, rooted.empty() ? "" : ")"));
  }
  const auto list = [](std::vector<std::string>& names) {
    const size_t more = names.size() > kMostNames ? names.size() - kMostNames : 0;
    names.resize(names.size() - more);
    return absl::StrCat(absl::StrJoin(names, ", "), more > 0 ? absl::StrCat(" and ", more, " more") : "");
  };
  return absl::StrCat(inside.empty() ? "" : "; sums in it: ", list(inside),
                      outside.empty() ? "" : "; along rings: ", list(outside),
                      copied.empty() ? "" : "; by copies: ", list(copied));
}

std::shared_ptr<NcclCommunicator> NcclCollective::Usable() {
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
  std::thread([current = current_, before = current_->communicator, remake = remake_, windows = windows_,
               why = std::string(broken.message())] {
    absl::StatusOr<std::shared_ptr<NcclCommunicator>> made = remake();
    if (made.ok() && windows != nullptr) windows->Use(*made);  // its first sum waits for its window
    absl::MutexLock made_lock(&current->mutex);
    current->is_making = false;
    // Otherwise its registration has failed already, and it was replaced (Replace).
    const bool is_first = current->communicator == before;
    if (is_first && !made.ok()) {
      current->is_given_up = true;
      current->why = absl::StrCat(why, "; it cannot be made anew: ", made.status().message());
      return;
    }
    if (is_first) current->communicator = *std::move(made);
    ++current->made_anew;
    current->why = why;
  }).detach();
  return nullptr;
}

void NcclCollective::ReduceScatter(ReduceScatterRequest request, Done done) {
  if (windows_ == nullptr) return Issue(std::move(request), std::move(done));
  struct Waiting {
    ReduceScatterRequest request;
    Done done;
  };
  // Shared: one of two callbacks takes it.
  auto waiting = std::make_shared<Waiting>(Waiting{std::move(request), std::move(done)});
  windows_->Enter(
      [this, waiting] {
        Issue(std::move(waiting->request), [windows = windows_, done = std::move(waiting->done)](absl::Status status) {
          windows->Leave();
          if (done) done(std::move(status));
        });
      },
      [waiting] {
        if (waiting->done) waiting->done(absl::CancelledError("reduce: the job has ended"));
      });
}

void NcclCollective::Issue(ReduceScatterRequest request, Done done) {
  const absl::StatusOr<std::vector<std::vector<ReduceRun>>> runs = local_.RunsByRank(request, /*node=*/0);
  const std::shared_ptr<NcclCommunicator> communicator = runs.ok() ? Usable() : nullptr;
  if (communicator == nullptr) {
    local_.ReduceScatter(std::move(request), std::move(done));
    return;
  }
  const size_t ranks = devices_.size();
  Summed summed;
  std::vector<std::vector<DeviceOp>> own(ranks);  // of each rank's part, after the sum
  for (size_t rank = 0; rank < ranks; ++rank) {
    for (const ReduceRun& run : (*runs)[rank]) {
      if (run.sources.size() == ranks && TakesDType(request, run)) {
        AddReduceOps(request, run, rank, {InSlot(request, run, rank)}, own[rank]);
        summed.runs.emplace_back(run, static_cast<int>(rank));
        summed.numel += run.numel;
      } else {
        AddReduceOps(request, run, rank, SourcesOf(request, run), own[rank]);
        summed.copied.insert(run.flat_param);
        by_copies_ += static_cast<uint64_t>(run.numel);
      }
    }
  }
  by_nccl_ += static_cast<uint64_t>(summed.numel);
  const std::vector<SlotPart> slot_parts = PartsOf(*request.plan, summed, static_cast<int>(ranks));
  if (summed.runs.empty()) Note(request, {});
  std::vector<DevicePart> parts;
  for (size_t rank = 0; rank < ranks; ++rank) {
    std::vector<DeviceOp> ops;
    if (!request.zeros.empty()) ops = std::move(request.zeros[rank]);
    if (!summed.runs.empty()) {
      SumOp sum;
      sum.communicator = communicator.get();
      sum.member = static_cast<int>(rank);
      for (const SlotPart& part : slot_parts) {
        float* const in_slot = reinterpret_cast<float*>(request.sources[rank].slot + part.offset_bytes);
        sum.parts.push_back({in_slot, in_slot, part.numel, part.root});
        sum.numel += part.numel;
      }
      sum.scatter = slot_parts.size() == ranks && ScattersAt(sum, 0);
      if (rank == 0) Note(request, sum);
      ops.emplace_back(std::move(sum));
    }
    std::move(own[rank].begin(), own[rank].end(), std::back_inserter(ops));
    parts.push_back({devices_[rank], std::move(ops)});
  }
  // The communicator lives as long as what names it. Sums that have waited come from another thread than the loop, but
  // all devices must get the operations of all communicators in one order.
  absl::MutexLock lock(&NcclIssueMutex());
  FanOut(
      std::move(parts), StreamId::kPostBackward, request.label, devices_.front(), absl::OkStatus(),
      [keep = communicator, done = std::move(done)](absl::Status status) { done(std::move(status)); },
      [communicator](const absl::Status& why) { communicator->Break(why); });
}

}  // namespace shardd
