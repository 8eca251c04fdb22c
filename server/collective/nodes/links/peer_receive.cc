// Receives the other nodes' data for sums (peer_exchange.h).

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/collective/nodes/links/peer_exchange.h"
#include "server/collective/nodes/links/peer_sum.h"

namespace shardd {

void PeerExchange::OnData(int node, const v1::PeerData& header, absl::string_view elements) {
  absl::MutexLock lock(&mutex_);
  if (header.generation() > generation_) {
    AdvanceLocked(header.generation(), absl::AbortedError("the nodes have begun another attempt"));
  }
  if (header.generation() < generation_ || failed_.has_value() || stopping_) {
    return;
  }
  peers_[node].touched = true;
  const auto numel = static_cast<int64_t>(elements.size() / sizeof(float));
  absl::Status status;
  if (header.numel() < 1 || header.numel() > max_numel_ || header.offset() < 0 ||
      header.offset() > header.numel() - numel) {
    status = absl::InvalidArgumentError(absl::StrCat("elements out of range (got ", numel, " at ", header.offset(),
                                                     " of ", header.numel(), ", want at most ", max_numel_, ")"));
  } else {
    status = header.is_sum() ? ReceiveSum(node, header, elements) : ReceivePart(node, header, elements);
  }
  if (!status.ok()) {
    FailLocked(absl::Status(status.code(), absl::StrCat("node ", node, ", sum ", header.sequence(), ": ",
                                                        status.message(), "; nodes must add the same")));
  }
  woken_ = true;
}

absl::StatusOr<PeerExchange::Slot*> PeerExchange::SlotLocked(uint64_t sequence, int64_t numel, bool scattered) {
  Slot& slot = slots_[sequence % slot_count_];
  if (slot.used && slot.sequence == sequence) {
    if (slot.numel != numel || slot.scattered != scattered) {
      return absl::InvalidArgumentError(
          absl::StrCat("nodes have different numbers of elements (got ", numel, " and ", slot.numel, ")"));
    }
    return &slot;
  }
  // A node begins a sum when it is done with the sum `slots` before it, so all that it sent for that one was added
  // here.
  if (slot.used && (!slot.added || sequence < slot.sequence)) {
    return absl::InvalidArgumentError(absl::StrCat("sum ", sequence, " is not at hand (sum ", slot.sequence,
                                                   " is, and ", slot_count_, " at a time)"));
  }
  slot = {.used = true,
          .sequence = sequence,
          .numel = numel,
          .scattered = scattered,
          .received = std::vector<int64_t>(nodes_),
          .added = (scattered ? numel : PieceCut{numel, nodes_}.Numel(node_)) == 0};
  return &slot;
}

absl::Status PeerExchange::ReceivePart(int node, const v1::PeerData& header, absl::string_view elements) {
  if (header.scattered() && header.numel() > slot_numel_) {
    return absl::InvalidArgumentError(
        absl::StrCat("piece is too large (got ", header.numel(), " elements, want at most ", slot_numel_, ")"));
  }
  absl::StatusOr<Slot*> slot = SlotLocked(header.sequence(), header.numel(), header.scattered());
  if (!slot.ok()) {
    return slot.status();
  }
  const PieceCut even{header.numel(), nodes_};
  const int64_t begin = header.scattered() ? 0 : even.Begin(node_);
  const int64_t mine = header.scattered() ? header.numel() : even.Numel(node_);
  const auto numel = static_cast<int64_t>(elements.size() / sizeof(float));
  const int64_t received = (*slot)->received[node];
  if (header.offset() != begin + received || numel > mine - received) {
    return absl::InvalidArgumentError(absl::StrCat("another part was to be sent (got ", numel, " elements at ",
                                                   header.offset(), ", want at most ", mine - received, " at ",
                                                   begin + received, ")"));
  }
  // No mutex is needed: nobody reads beyond what was received, each node has its own place, and this is the only call
  // for this node.
  float* to = Received(header.sequence(), node) + received;
  mutex_.Unlock();
  memcpy(to, elements.data(), elements.size());
  mutex_.Lock();
  if (header.generation() == generation_) {
    (*slot)->received[node] += numel;
  }
  return absl::OkStatus();
}

absl::Status PeerExchange::ReceiveSum(int node, const v1::PeerData& header, absl::string_view elements) {
  const auto found = sums_.find(header.sequence());
  if (header.scattered() && !HasOwnPlace(node)) {
    if (found == sums_.end() || !found->second->started || !found->second->cut.scattered ||
        found->second->cut.Numel(node) == 0 || found->second->received[node] != 0) {
      return absl::InvalidArgumentError("no piece of such a sum was to be added");
    }
    found->second->received[node] = 1;
    ++found->second->others_added;
    return absl::OkStatus();
  }
  // Scattered, it is the result of that node's piece, which this node needs, too.
  if (found == sums_.end() || !found->second->started || found->second->cut.scattered != header.scattered() ||
      (header.scattered() ? found->second->cut.Numel(node) : found->second->cut.numel) != header.numel()) {
    return absl::InvalidArgumentError(absl::StrCat("no such sum of ", header.numel(), " elements is waited for"));
  }
  const SumPtr sum = found->second;
  const auto numel = static_cast<int64_t>(elements.size() / sizeof(float));
  const int64_t received = sum->received[node];
  const int64_t offset = header.offset() + (header.scattered() ? sum->cut.Begin(node) : 0);
  if (offset != sum->cut.Begin(node) + received || numel > sum->cut.Numel(node) - received) {
    return absl::InvalidArgumentError(
        absl::StrCat("another part of the sum was to be sent (got ", numel, " elements at ", offset, ", want at most ",
                     sum->cut.Numel(node) - received, " at ", sum->cut.Begin(node) + received, ")"));
  }
  ++sum->users;
  mutex_.Unlock();
  sum->CopyIn(offset, elements.data(), numel);
  mutex_.Lock();
  --sum->users;
  sum->received[node] += numel;
  sum->summed += numel;
  if (header.scattered() && sum->received[node] == sum->cut.Numel(node)) ++sum->others_added;
  return absl::OkStatus();
}

}  // namespace shardd
