// Submits sums and moves to the devices (nccl_exchange.h).

#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/collective/nodes/nccl/nccl_exchange.h"

namespace shardd {

std::vector<DevicePart> NcclExchange::SumParts(const Sum& sum, const Communicators& on) const {
  std::vector<DevicePart> parts;  // in the order of ranks, also for ranks that share a device
  for (size_t i = 0; i < sum.parts.size();) {
    const int rank = sum.parts[i].rank;
    SumOp op;
    op.communicator = on[static_cast<size_t>(rank)].get();
    op.member = options_.node;
    for (; i < sum.parts.size() && sum.parts[i].rank == rank; ++i) {
      op.parts.push_back({sum.parts[i].data, sum.parts[i].data, sum.parts[i].numel, sum.parts[i].node});
      op.numel += sum.parts[i].numel;
    }
    parts.push_back({options_.devices[static_cast<size_t>(rank)], {std::move(op)}});
  }
  return parts;
}

std::vector<DevicePart> NcclExchange::MoveParts(const Sum& move, const Communicators& on) const {
  std::vector<DevicePart> parts;
  const size_t ranks = options_.devices.size();
  for (size_t rank = 0; rank < ranks; ++rank) {
    MoveOp op;
    op.communicator = on[ranks + rank].get();
    op.member = options_.node;
    for (const NodeMove& of : move.moves) {
      if (of.rank != static_cast<int>(rank)) continue;
      op.moves.push_back(of.move);
      op.size_bytes += of.move.size_bytes;
    }
    if (!op.moves.empty()) parts.push_back({options_.devices[rank], {std::move(op)}});
  }
  return parts;
}

absl::Status NcclExchange::Greet(const Communicators& made) {
  if (!options_.moves) return absl::OkStatus();
  Sum all;
  for (size_t rank = 0; rank < options_.devices.size(); ++rank) {
    for (int node = 0; node < options_.nodes; ++node) {
      if (node == options_.node) continue;
      char* const to = options_.greetings[rank] + 2 * node * kGreetingBytes;
      all.moves.push_back({static_cast<int>(rank), {node, to, nullptr, kGreetingBytes}});
      all.moves.push_back({static_cast<int>(rank), {node, nullptr, to + kGreetingBytes, kGreetingBytes}});
    }
  }
  const auto greeted = std::make_shared<std::optional<absl::Status>>();  // guarded by the mutex
  const auto give_up = [made](const absl::Status& why) {
    for (const auto& communicator : made) communicator->Break(why);
  };
  ++unreported_;
  mutex_.Unlock();
  {
    absl::MutexLock lock(&NcclIssueMutex());
    FanOut(
        MoveParts(all, made), StreamId::kUnshard, "greet the other nodes", options_.devices.front(), absl::OkStatus(),
        [this, greeted, made](absl::Status status) {
          for (const auto& communicator : made) status.Update(communicator->broken());
          absl::MutexLock lock(&mutex_);
          *greeted = std::move(status);
          --unreported_;
        },
        give_up);
  }
  const absl::Time limit = absl::Now() + options_.communicators.limit;
  mutex_.Lock();
  const auto is_told = [greeted] { return greeted->has_value(); };
  while (!mutex_.AwaitWithTimeout(absl::Condition(&is_told), kAskInterval)) {
    mutex_.Unlock();
    absl::Status status;
    for (const auto& communicator : made) status.Update(communicator->Ask());
    if (status.ok() && absl::Now() > limit) status = absl::DeadlineExceededError("greeting the other nodes");
    if (!status.ok()) give_up(status);
    mutex_.Lock();
  }
  return **greeted;
}

void NcclExchange::IssueNext(Queue& queue) {
  const std::shared_ptr<Sum> sum = queue.waiting.begin()->second;
  queue.waiting.erase(queue.waiting.begin());
  ++queue.next;
  ++under_way_;
  ++unreported_;
  const Communicators on = communicators_;
  mutex_.Unlock();
  {
    absl::MutexLock lock(&NcclIssueMutex());
    FanOut(
        sum->is_move ? MoveParts(*sum, on) : SumParts(*sum, on),
        sum->is_move ? StreamId::kUnshard : StreamId::kPostBackward, sum->label, options_.devices.front(),
        absl::OkStatus(), [this, sum, on](absl::Status status) { SumIsDone(sum, on, std::move(status)); },
        [on](const absl::Status& why) {
          for (const auto& communicator : on) communicator->Break(why);
        });
  }
  mutex_.Lock();
}

void NcclExchange::SumIsDone(const std::shared_ptr<Sum>& sum, const Communicators& on, absl::Status status) {
  // A stream does not report an abort: what follows on it is no sum.
  for (const auto& communicator : on) status.Update(communicator->broken());
  {
    absl::MutexLock lock(&mutex_);
    --under_way_;
    if (ends_ || sum->generation != generation_) {
      status = absl::AbortedError(absl::StrCat(sum->label, ": the generation has ended (", sum->generation, ")"));
    } else if (!status.ok()) {
      if (failed_.ok()) FailLocked(status);
      status = failed_;
    } else if (!sum->is_move) {
      ++sums_;
    }
  }
  std::exchange(sum->done, nullptr)(std::move(status));
  absl::MutexLock lock(&mutex_);
  --unreported_;
}

}  // namespace shardd
