// Answers the pulls of other nodes (peer_gather.h).

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/collective/nodes/links/peer_gather.h"
#include "server/peer/peer_links.h"

namespace shardd {
namespace {

static_assert(PeerLinks::kMaxDataBytes >= GatherParts::kMinPieceBytes);
constexpr int kMaxUnsent = 4;  // pieces of at most PeerLinks::kMaxDataBytes on their way to one node
constexpr size_t kMaxRefusalBytes = 1024;

}  // namespace

void PeerGather::OnPull(int node, const v1::PeerMessage& message) {
  absl::MutexLock lock(&mutex_);
  if (message.generation() > generation_) {
    AdvanceLocked(message.generation());
  }
  if (message.generation() < generation_ || stopping_) {
    return;
  }
  const v1::PeerMessage::Pull& pull = message.pull();
  Peer& peer = peers_[static_cast<size_t>(node)];
  peer.touched = true;
  if (pull.code() == 0) {
    if (const absl::Status status = OfferLocked(node, pull); !status.ok()) {
      RefuseLocked(peer, pull, status);
    }
  } else if (!failed_.has_value()) {
    if (const absl::Status status = RefusedLocked(node, pull); !status.ok()) {
      FailLocked(status);
    }
  }
}

absl::Status PeerGather::OfferLocked(int node, const v1::PeerMessage::Pull& pull) {
  if (failed_.has_value()) {
    return *failed_;
  }
  if (!IsOfRow(node)) {
    return absl::InvalidArgumentError(absl::StrCat("node ", node, " is of another row than node ", node_,
                                                   "; a node asks those of its own row, ", row_nodes_, " nodes from ",
                                                   row_first_));
  }
  std::deque<Offer>& offers = peers_[static_cast<size_t>(node)].offers;
  if (pull.group() < 0 || pull.group() >= groups() || pull.version() == 0) {
    return absl::InvalidArgumentError(absl::StrCat("there is no such group or version (got group ", pull.group(),
                                                   " of version ", pull.version(), ", want a group below ", groups(),
                                                   " and a version from 1)"));
  }
  if (Parts(pull.group(), node_).bytes() == 0) {
    return absl::InvalidArgumentError(absl::StrCat("it holds nothing of group \"",
                                                   plan_->groups[static_cast<size_t>(pull.group())].name,
                                                   "\"; nodes must have the same plan"));
  }
  if (std::any_of(offers.begin(), offers.end(),
                  [&](const Offer& offer) { return offer.pull.transfer() == pull.transfer(); })) {
    return absl::InvalidArgumentError(absl::StrCat("transfer ", pull.transfer(), " was asked for before"));
  }
  if (offers.size() >= max_offers_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("too much is asked for at a time (want at most ", max_offers_, ")"));
  }
  if (pull.version() < readable_) {
    return absl::FailedPreconditionError(absl::StrCat("it has version ", readable_, " now"));
  }
  offers.push_back({.pull = pull});
  woken_ = true;
  return absl::OkStatus();
}

void PeerGather::RefuseLocked(Peer& peer, const v1::PeerMessage::Pull& pull, const absl::Status& why) {
  if (peer.refusals.size() >= 2 * max_offers_) {
    return;  // this node asks without end
  }
  v1::PeerMessage::Pull answer = pull;
  answer.set_code(static_cast<int>(why.code()));
  answer.set_message(std::string(why.message().substr(0, kMaxRefusalBytes)));
  peer.refusals.push_back(std::move(answer));
  woken_ = true;
}

bool PeerGather::RefuseOne() {
  for (int node = 0; node < nodes_; ++node) {
    Peer& peer = peers_[static_cast<size_t>(node)];
    if (peer.refusals.empty() || stopping_) {
      continue;
    }
    v1::PeerMessage message;
    message.set_generation(generation_);
    *message.mutable_pull() = std::move(peer.refusals.front());
    peer.refusals.pop_front();
    mutex_.Unlock();
    links_->Send(node, std::move(message));
    mutex_.Lock();
    return true;
  }
  return false;
}

bool PeerGather::SendOne() {
  if (readable_ == 0) {
    return false;
  }
  for (int turn = 0; turn < nodes_; ++turn) {
    const auto node = static_cast<int>(next_peer_++ % static_cast<size_t>(nodes_));
    Peer& peer = peers_[static_cast<size_t>(node)];
    const auto ready = [this](const Offer& offer)
                           ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return offer.pull.version() == readable_; };
    const auto found = std::find_if(peer.offers.begin(), peer.offers.end(), ready);
    if (found == peer.offers.end() || peer.unsent >= kMaxUnsent) {
      continue;
    }
    v1::PeerData header;
    header.set_generation(generation_);
    header.set_sequence(found->pull.transfer());
    header.set_slab(v1::SLAB_UNSHARDED);
    header.set_offset(found->sent);
    const GatherParts& parts = Parts(found->pull.group(), node_);
    header.set_numel(parts.bytes());
    if (buffers_.empty()) {
      buffers_.push_back(std::make_unique<char[]>(PeerLinks::kMaxDataBytes));
    }
    std::unique_ptr<char[]> buffer = std::move(buffers_.back());
    buffers_.pop_back();
    reading_ = true;
    mutex_.Unlock();
    const int64_t bytes =
        parts.CopyOut(source_, header.offset(), buffer.get(), std::min(parts.piece_bytes(), PeerLinks::kMaxDataBytes));
    mutex_.Lock();
    reading_ = false;
    if (header.generation() != generation_ || failed_.has_value()) {  // the pull is void
      buffers_.push_back(std::move(buffer));
      return true;
    }
    // Nothing else removes offers: SetReadable has waited.
    const auto offer = std::find_if(peer.offers.begin(), peer.offers.end(),
                                    [&](const Offer& one) { return one.pull.transfer() == header.sequence(); });
    offer->sent += bytes;
    if (offer->sent == parts.bytes()) {
      peer.offers.erase(offer);
    }
    ++peer.unsent;
    mutex_.Unlock();
    char* const memory = buffer.release();  // the links own it until they call back
    links_->SendData(node, header, absl::string_view(memory, static_cast<size_t>(bytes)),
                     [this, node, memory, generation = header.generation()](const absl::Status& status) {
                       absl::MutexLock lock(&mutex_);
                       buffers_.emplace_back(memory);
                       --peers_[static_cast<size_t>(node)].unsent;
                       woken_ = true;
                       if (!status.ok() && generation == generation_) {
                         FailLocked(absl::UnavailableError(
                             absl::StrCat("node ", node, " cannot be sent parameters: ", status.message())));
                       }
                     });
    mutex_.Lock();
    return true;
  }
  return false;
}

}  // namespace shardd
