// Receives the answers to this node's pulls (peer_gather.h).

#include "absl/strings/str_cat.h"
#include "common/tensor/float8_blocks.h"
#include "server/collective/nodes/links/peer_gather.h"

namespace shardd {

void PeerGather::OnData(int node, const v1::PeerData& header, absl::string_view elements) {
  absl::MutexLock lock(&mutex_);
  if (header.generation() > generation_) {
    AdvanceLocked(header.generation());
  }
  if (header.generation() < generation_ || failed_.has_value() || stopping_) {
    return;
  }
  Peer& peer = peers_[static_cast<size_t>(node)];
  peer.touched = true;
  peer.heard = MonotonicNow();
  if (const absl::Status status = ReceiveLocked(node, header, elements); !status.ok()) {
    FailLocked(absl::Status(status.code(), absl::StrCat("node ", node, ", transfer ", header.sequence(), ": ",
                                                        status.message(), "; nodes must have the same plan")));
  }
}

absl::Status PeerGather::ReceiveLocked(int node, const v1::PeerData& header, absl::string_view elements) {
  const auto found = transfers_.find(header.sequence());
  if (found == transfers_.end() || found->second->node != node) {
    return absl::InvalidArgumentError("it was not asked for that");
  }
  const TransferPtr transfer = found->second;
  const CallPtr call = transfer->call;
  const GatherParts& parts = Parts(call->group, node);
  const auto size = static_cast<int64_t>(elements.size());
  if (header.numel() != parts.bytes() || header.offset() != transfer->received || size < 1 ||
      size > parts.bytes() - transfer->received) {
    return absl::InvalidArgumentError(absl::StrCat(
        "another part of group \"", plan_->groups[static_cast<size_t>(call->group)].name, "\" was to be sent (got ",
        size, " bytes at ", header.offset(), " of ", header.numel(), ", want at most ",
        parts.bytes() - transfer->received, " at ", transfer->received, " of ", parts.bytes(), ")"));
  }
  if (!parts.MayEndAt(header.offset() + size)) {
    return absl::InvalidArgumentError(absl::StrCat("a piece of group \"",
                                                   plan_->groups[static_cast<size_t>(call->group)].name,
                                                   "\" ends within a float8 block (got ", size, " bytes at ",
                                                   header.offset(), ", want whole blocks of ", kFloat8BlockBytes, ")"));
  }
  if (!call->ended.has_value()) {
    // No mutex is needed: each node has its own ranges of the image, and this is the only call for this node.
    ++call->users;
    mutex_.Unlock();
    parts.CopyIn(header.offset(), elements.data(), size, call->image);
    mutex_.Lock();
    --call->users;
    woken_ = true;
  }
  transfer->received += size;
  received_bytes_ += size;
  if (transfer->received == parts.bytes()) {
    transfers_.erase(header.sequence());
    --call->waiting;
    if (call->waiting == 0) {
      EndLocked(call, absl::OkStatus());
    }
  }
  return absl::OkStatus();
}

absl::Status PeerGather::RefusedLocked(int node, const v1::PeerMessage::Pull& answer) {
  const auto found = transfers_.find(answer.transfer());
  if (found == transfers_.end() || found->second->node != node) {
    return absl::InvalidArgumentError(
        absl::StrCat("node ", node, " refuses what it was not asked for (transfer ", answer.transfer(), ")"));
  }
  const bool known = answer.code() > 0 && answer.code() <= static_cast<int>(absl::StatusCode::kUnauthenticated);
  EndLocked(found->second->call,
            absl::Status(known ? static_cast<absl::StatusCode>(answer.code()) : absl::StatusCode::kInvalidArgument,
                         absl::StrCat("node ", node, " does not send version ", found->second->call->version, ": ",
                                      answer.message())));
  return absl::OkStatus();
}

}  // namespace shardd
