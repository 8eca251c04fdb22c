// Submits sums and moves to the devices (nccl_exchange.h).

#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/clock/deadline.h"
#include "server/collective/nodes/links/piece_cut.h"
#include "server/collective/nodes/nccl/nccl_exchange.h"

namespace shardd {

void NcclExchange::AddPart(const NodePart& part, SumOp* sum, MoveOp* pieces) const {
  sum->numel += part.numel;
  const int rows = options_.nodes / row_nodes();
  if (rows == 1 || part.node == kAllMembers) {
    sum->parts.push_back({part.data, part.data, part.numel, part.node});
    return;
  }
  const PieceCut cut = {.numel = part.numel, .nodes = rows};
  const int own = options_.node / row_nodes();
  const bool has_place = options_.node % row_nodes() == part.node;
  const auto add_move = [&](int peer, const float* src, float* dst, int64_t numel) {
    const int64_t size_bytes = numel * static_cast<int64_t>(sizeof(float));
    pieces->moves.push_back({peer, reinterpret_cast<const char*>(src), reinterpret_cast<char*>(dst), size_bytes});
    pieces->size_bytes += size_bytes;
  };
  for (int row = 0; row < rows; ++row) {
    const int node = row * row_nodes() + part.node;
    float* const piece = part.data + cut.Begin(row);
    if (cut.Numel(row) > 0) sum->parts.push_back({piece, piece, cut.Numel(row), node});
    if (!has_place || row == own) continue;
    if (cut.Numel(own) > 0) add_move(node, part.data + cut.Begin(own), nullptr, cut.Numel(own));
    if (cut.Numel(row) > 0) add_move(node, nullptr, piece, cut.Numel(row));
  }
}

std::vector<DevicePart> NcclExchange::SumParts(const Sum& sum, const Communicators& on) const {
  std::vector<DevicePart> parts;  // in the order of ranks, also for ranks that share a device
  for (size_t i = 0; i < sum.parts.size();) {
    const int rank = sum.parts[i].rank;
    SumOp op;
    MoveOp pieces;
    op.communicator = pieces.communicator = on[static_cast<size_t>(rank)].get();
    op.member = pieces.member = options_.node;
    for (; i < sum.parts.size() && sum.parts[i].rank == rank; ++i) AddPart(sum.parts[i], &op, &pieces);
    parts.push_back({options_.devices[static_cast<size_t>(rank)], {std::move(op)}});
    if (!pieces.moves.empty()) parts.back().ops.push_back(std::move(pieces));
  }
  return parts;
}

std::vector<DevicePart> NcclExchange::MoveParts(const std::vector<NodeMove>& moves, const Communicators& on,
                                                size_t first) const {
  std::vector<DevicePart> parts;
  for (size_t rank = 0; rank < options_.devices.size(); ++rank) {
    MoveOp op;
    op.communicator = on[first + rank].get();
    op.member = options_.node;
    for (const NodeMove& of : moves) {
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
  const size_t ranks = options_.devices.size();
  std::vector<NodeMove> in_row;     // on communicators for moves
  std::vector<NodeMove> of_pieces;  // on those for sums
  for (size_t rank = 0; rank < ranks; ++rank) {
    for (int node = 0; node < options_.nodes; ++node) {
      if (node == options_.node) continue;
      const bool same_row = node / row_nodes() == options_.node / row_nodes();
      if (!same_row && node % row_nodes() != options_.node % row_nodes()) continue;
      char* const to = options_.greetings[rank] + 2 * node * kGreetingBytes;
      std::vector<NodeMove>& moves = same_row ? in_row : of_pieces;
      moves.push_back({static_cast<int>(rank), {node, to, nullptr, kGreetingBytes}});
      moves.push_back({static_cast<int>(rank), {node, nullptr, to + kGreetingBytes, kGreetingBytes}});
    }
  }
  // All nodes greet in one order, on communicators for moves first.
  std::vector<DevicePart> parts = MoveParts(in_row, made, ranks);
  for (DevicePart& part : MoveParts(of_pieces, made, 0)) parts.push_back(std::move(part));
  const auto greeted = std::make_shared<std::optional<absl::Status>>();  // guarded by the mutex
  const auto give_up = [made](const absl::Status& why) {
    for (const auto& communicator : made) communicator->Break(why);
  };
  ++unreported_;
  mutex_.Unlock();
  {
    absl::MutexLock lock(&NcclIssueMutex());
    FanOut(
        std::move(parts), StreamId::kUnshard, "greet the other nodes", options_.devices.front(), absl::OkStatus(),
        [this, greeted, made](absl::Status status) {
          for (const auto& communicator : made) status.Update(communicator->broken());
          absl::MutexLock lock(&mutex_);
          *greeted = std::move(status);
          --unreported_;
        },
        give_up);
  }
  const Deadline limit = Deadline::In(options_.communicators.limit);
  mutex_.Lock();
  const auto is_told = [greeted] { return greeted->has_value(); };
  while (!mutex_.AwaitWithTimeout(absl::Condition(&is_told), kAskInterval)) {
    mutex_.Unlock();
    absl::Status status;
    for (const auto& communicator : made) status.Update(communicator->Ask());
    if (status.ok() && limit.HasPassed()) status = absl::DeadlineExceededError("greeting the other nodes");
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
        sum->is_move ? MoveParts(sum->moves, on, options_.devices.size()) : SumParts(*sum, on),
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
    if (sum->generation == generation_) ++(sum->is_move ? turns_.done.moves : turns_.done.sums);
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
