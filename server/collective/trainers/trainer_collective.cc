#include "server/collective/trainers/trainer_collective.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "common/clock/monotonic_now.h"
#include "common/shm/sum_ring.h"
#include "common/status/status_macros.h"
#include "server/collective/local/fan_out.h"
#include "server/collective/trainers/sum_channel.h"
#include "server/device/device.h"

namespace shardd {
namespace {

int64_t Offset(const void* p, const char* base) { return static_cast<const char*>(p) - base; }

// Fills in the ranks whose gradients a run adds.
void SetRanks(const ReduceScatterRequest& request, const ReduceRun& run, SumRecord* record) {
  for (const int k : run.sources) {
    const int rank = request.sources[static_cast<size_t>(k)].rank;
    record->ranks[rank / 64] |= uint64_t{1} << (rank % 64);
  }
}

}  // namespace

TrainerCollective::TrainerCollective(std::vector<Device*> devices)
    : devices_(devices), local_(std::move(devices)), ranks_(devices_.size()) {}

std::string TrainerCollective::Describe() const {
  std::string text = absl::StrCat(
      "trainers: each rank's library adds its part of the gradients in its trainer's context, because the job's config "
      "says trainer_sums (",
      by_trainers_, " operations by them, ", by_devices_, " by devices of ranks without a session, ", requests_.size(),
      " sums under way); gathers are local");
  return text;
}

void TrainerCollective::SetSession(int rank, uint64_t session_id, std::shared_ptr<SumChannel> channel) {
  Rank& state = ranks_[static_cast<size_t>(rank)];
  if (state.channel != nullptr) {
    Fail(rank, absl::AbortedError(absl::StrCat("sums: the session of rank ", rank, " has ended")));
  }
  state.session_id = session_id;
  state.channel = std::move(channel);
  state.queue.clear();
  state.told = state.summed = 0;
  for (size_t other = 0; other < ranks_.size(); ++other) {
    if (ranks_[other].channel == nullptr) continue;
    ranks_[other].channel->SetPeer(rank, session_id);
    if (state.channel != nullptr) state.channel->SetPeer(static_cast<int>(other), ranks_[other].session_id);
  }
}

absl::Status TrainerCollective::TellOps(int rank, const ReduceScatterRequest& request, const std::vector<DeviceOp>& ops,
                                        const ReduceRun* run) {
  Rank& state = ranks_[static_cast<size_t>(rank)];
  for (const DeviceOp& op : ops) {
    SumRecord record = {};
    record.group = request.group;
    if (const auto* const sum = std::get_if<ReduceOp>(&op); sum != nullptr && run != nullptr) {
      const int slot = request.plan->groups[static_cast<size_t>(request.group)].gradient_slot;
      record.kind = SumKind::kSum;
      SetRanks(request, *run, &record);
      record.source_offset_bytes =
          request.plan->gradient_slots[static_cast<size_t>(slot)].offset_bytes + SlotOffsetBytes(*request.plan, *run);
      record.dst_offset_bytes = Offset(sum->dst, request.gradients);
      record.numel = sum->numel;
      record.source_dtype = sum->source_dtype;
      record.reduce_dtype = sum->reduce_dtype;
      record.keep = sum->keep;
      record.scale = sum->scale;
      record.accumulate = sum->accumulate ? 1 : 0;
    } else if (const auto* const copy = std::get_if<CopyOp>(&op); copy != nullptr) {
      record.kind = SumKind::kCopy;
      record.source_offset_bytes = Offset(copy->src, request.gradients);
      record.dst_offset_bytes = Offset(copy->dst, request.gradients);
      record.numel = copy->size_bytes;
    } else if (const auto* const zero = std::get_if<ZeroOp>(&op); zero != nullptr) {
      record.kind = SumKind::kZero;
      record.dst_offset_bytes = Offset(zero->dst, request.gradients);
      record.numel = zero->size_bytes;
    } else {
      return absl::InternalError(absl::StrCat("sums: operation ", op.index(), " is none that trainers do"));
    }
    if (record.numel == 0) continue;
    state.queue.push_back(record);
    ++state.told;
    ++by_trainers_;
  }
  return absl::OkStatus();
}

absl::Status TrainerCollective::Tell(int rank, const ReduceScatterRequest& request,
                                     const std::vector<ReduceRun>& runs) {
  if (!request.zeros.empty()) {
    SHARDD_RETURN_IF_ERROR(TellOps(rank, request, request.zeros[static_cast<size_t>(rank)], nullptr));
  }
  std::vector<DeviceOp> ops;
  for (const ReduceRun& run : runs) {
    ops.clear();
    AddReduceOps(request, run, static_cast<size_t>(rank), SourcesOf(request, run), ops);
    SHARDD_RETURN_IF_ERROR(TellOps(rank, request, ops, &run));
  }
  return absl::OkStatus();
}

void TrainerCollective::ReduceScatter(ReduceScatterRequest request, Done done) {
  absl::StatusOr<std::vector<std::vector<ReduceRun>>> runs = local_.RunsByRank(request, /*node=*/0);
  absl::Status status = runs.status();
  if (status.ok() && !request.staging.empty()) {
    status = absl::UnimplementedError("reduce-scatter: trainers add in place, and gradient shards are the host's");
  }
  Request entry = {request.label, MonotonicNow(), std::vector<uint64_t>(ranks_.size(), 0), nullptr};
  std::vector<std::pair<size_t, std::vector<DeviceOp>>> by_device;
  bool by_session = false;
  for (size_t r = 0; status.ok() && r < ranks_.size(); ++r) {
    Rank& rank = ranks_[r];
    if (rank.by_session()) {
      const uint64_t before = rank.told;
      status = Tell(static_cast<int>(r), request, (*runs)[r]);
      if (rank.told != before) {
        entry.ends[r] = rank.told;
        by_session = true;
      }
      continue;
    }
    std::vector<DeviceOp> ops;
    if (!request.zeros.empty()) ops = std::move(request.zeros[r]);
    for (const ReduceRun& run : (*runs)[r]) AddReduceOps(request, run, r, SourcesOf(request, run), ops);
    if (!ops.empty()) by_device.emplace_back(r, std::move(ops));
  }
  if (!status.ok() || (!by_session && by_device.empty())) {
    FanOut({}, StreamId::kPostBackward, request.label, devices_.front(), std::move(status), std::move(done));
    return;
  }
  done = JoinParts(static_cast<int>(by_device.size()) + (by_session ? 1 : 0), std::move(done));
  for (auto& [r, ops] : by_device) {
    by_devices_ += ops.size();
    const std::shared_ptr<std::atomic<int>> left = ranks_[r].on_device;
    left->fetch_add(1, std::memory_order_relaxed);
    devices_[r]->Submit(StreamId::kPostBackward, {request.label, std::move(ops), [left, done](absl::Status run) {
                                                    left->fetch_sub(1, std::memory_order_release);
                                                    done(std::move(run));
                                                  }});
  }
  if (!by_session) return;
  entry.done = std::move(done);
  requests_.push_back(std::move(entry));
  for (Rank& rank : ranks_) Write(rank);
}

void TrainerCollective::Write(Rank& rank) {
  if (rank.channel == nullptr || rank.queue.empty()) return;
  const uint64_t before = rank.channel->written();
  while (!rank.queue.empty() && rank.channel->Write(rank.queue.front())) rank.queue.pop_front();
  if (rank.channel->written() != before) rank.channel->Publish();
}

void TrainerCollective::Fail(int rank, const absl::Status& status) {
  const auto r = static_cast<size_t>(rank);
  std::list<Request> failed;
  for (auto it = requests_.begin(); it != requests_.end();) {
    const auto request = it++;
    if (request->ends[r] > ranks_[r].summed) failed.splice(failed.end(), requests_, request);
  }
  for (Request& request : failed) {
    request.done(absl::Status(status.code(), absl::StrCat(request.label, ": ", status.message())));
  }
}

bool TrainerCollective::Poll() {
  if (requests_.empty()) return false;
  const size_t before = requests_.size();
  for (size_t r = 0; r < ranks_.size(); ++r) {
    Rank& rank = ranks_[r];
    if (rank.channel == nullptr || rank.summed == rank.told) continue;
    const absl::StatusOr<uint64_t> summed = rank.channel->Summed();
    if (!summed.ok()) {
      Fail(static_cast<int>(r), summed.status());
      rank.channel = nullptr;  // its words are not trusted any more; the epoch ends
      rank.queue.clear();
      continue;
    }
    rank.summed = *summed;
    Write(rank);
  }
  std::list<Request> ended;
  for (auto it = requests_.begin(); it != requests_.end();) {
    const auto request = it++;
    bool there = true;
    for (size_t r = 0; there && r < ranks_.size(); ++r) there = request->ends[r] <= ranks_[r].summed;
    if (there) ended.splice(ended.end(), requests_, request);
  }
  const bool found = !ended.empty() || requests_.size() != before;
  for (Request& request : ended) request.done(absl::OkStatus());
  return found;
}

TrainerCollective::Late TrainerCollective::FindLate(absl::Time now, absl::Duration limit) {
  Late late;
  for (const Request& request : requests_) {
    if (now - request.since < limit) break;  // requests are in order
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (request.ends[r] <= ranks_[r].summed) continue;
      late = {static_cast<int>(r), request.label, now - request.since, ranks_[r].summed, request.ends[r]};
      return late;
    }
  }
  return late;
}

}  // namespace shardd
