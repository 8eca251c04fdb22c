#include "server/collective/nodes/links/peer_gather.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/plan/node_part.h"
#include "server/peer/peer_links.h"

namespace shardd {

PeerGather::PeerGather(std::shared_ptr<const ShardPlan> plan, PeerLinks* links, const char* source)
    : plan_(std::move(plan)),
      links_(links),
      source_(source),
      node_(links->node()),
      nodes_(links->nodes()),
      row_nodes_(NodesOfRow(*plan_)),
      row_first_(node_ - node_ % row_nodes_),
      max_offers_(2 * plan_->groups.size()),
      peers_(static_cast<size_t>(nodes_)) {
  parts_.reserve(plan_->groups.size() * static_cast<size_t>(row_nodes_));
  for (int group = 0; group < groups(); ++group) {
    for (int place = 0; place < row_nodes_; ++place) {
      parts_.emplace_back(*plan_, group, place);
    }
  }
  thread_ = std::thread([this] { Run(); });
}

PeerGather::~PeerGather() {
  {
    absl::MutexLock lock(&mutex_);
    FailLocked(absl::AbortedError("the job's gathers are closed"));
    stopping_ = true;
    woken_ = true;
  }
  thread_.join();
}

void PeerGather::Gather(uint64_t generation, int group, uint64_t version, char* image, std::string label, Done done) {
  const auto call = std::make_shared<Call>(
      Call{.group = group, .version = version, .image = image, .label = std::move(label), .done = std::move(done)});
  std::vector<std::pair<int, v1::PeerMessage>> pulls;
  {
    absl::MutexLock lock(&mutex_);
    if (generation > generation_) {
      AdvanceLocked(generation);
    }
    if (const absl::Status status = CheckCallLocked(generation, group, version); !status.ok()) {
      EndLocked(call, status);
      return;
    }
    for (int step = 1; step < row_nodes_; ++step) {  // each node begins with another one
      const int node = row_first_ + (node_ - row_first_ + step) % row_nodes_;
      if (Parts(group, node).bytes() == 0) {
        continue;
      }
      v1::PeerMessage message;
      message.set_generation(generation);
      message.mutable_pull()->set_transfer(next_transfer_);
      message.mutable_pull()->set_group(group);
      message.mutable_pull()->set_version(version);
      pulls.emplace_back(node, std::move(message));
      transfers_.emplace(next_transfer_++, std::make_shared<Transfer>(Transfer{call, node, MonotonicNow()}));
      peers_[static_cast<size_t>(node)].touched = true;
      ++call->waiting;
    }
    if (call->waiting == 0) {
      EndLocked(call, absl::OkStatus());
    }
  }
  for (auto& [node, message] : pulls) {  // dropped if the link has just gone; then OnDown follows
    links_->Send(node, std::move(message));
  }
}

absl::Status PeerGather::CheckCallLocked(uint64_t generation, int group, uint64_t version) const {
  if (generation < generation_) {
    return absl::AbortedError(
        absl::StrCat("the attempt has ended (got generation ", generation, ", now ", generation_, ")"));
  }
  if (failed_.has_value()) {
    return *failed_;
  }
  if (group < 0 || group >= groups() || version == 0) {
    return absl::InvalidArgumentError(absl::StrCat("no such group or version (got group ", group, " of version ",
                                                   version, ", want a group below ", groups(),
                                                   " and a version from 1)"));
  }
  for (int node = row_first_; node < row_first_ + row_nodes_; ++node) {
    if (node != node_ && !peers_[static_cast<size_t>(node)].up && Parts(group, node).bytes() > 0) {
      return absl::UnavailableError(absl::StrCat("there is no link to node ", node));
    }
  }
  return absl::OkStatus();
}

void PeerGather::SetReadable(uint64_t version) {
  absl::MutexLock lock(&mutex_);
  if (version == readable_) {
    return;
  }
  readable_ = 0;  // no further piece of it begins
  const auto idle = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !reading_; };
  mutex_.Await(absl::Condition(&idle));
  readable_ = version;
  for (Peer& peer : peers_) {
    const auto refused = [&](const Offer& offer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      const bool gone = version != 0 && offer.pull.version() < version;
      if (gone) {
        RefuseLocked(peer, offer.pull, absl::FailedPreconditionError(absl::StrCat("it has version ", version, " now")));
      }
      return gone;
    };
    peer.offers.erase(std::remove_if(peer.offers.begin(), peer.offers.end(), refused), peer.offers.end());
  }
  woken_ = true;
}

void PeerGather::Begin(uint64_t generation) {
  absl::MutexLock lock(&mutex_);
  if (generation > generation_) {
    AdvanceLocked(generation);
  }
}

void PeerGather::OnUp(int node) {
  absl::MutexLock lock(&mutex_);
  peers_[static_cast<size_t>(node)].up = true;
}

void PeerGather::OnDown(int node, const absl::Status& why) {
  absl::MutexLock lock(&mutex_);
  Peer& peer = peers_[static_cast<size_t>(node)];
  peer.up = false;
  if (peer.touched) {
    FailLocked(absl::UnavailableError(absl::StrCat("node ", node, " is gone: ", why.message())));
  }
  peer.refusals.clear();
}

void PeerGather::AdvanceLocked(uint64_t generation) {
  EndCallsLocked(absl::AbortedError("the nodes have begun another attempt"));
  generation_ = generation;
  failed_.reset();
  for (Peer& peer : peers_) {
    peer.touched = false;
    peer.offers.clear();
    peer.refusals.clear();
  }
}

void PeerGather::FailLocked(const absl::Status& why) {
  if (!failed_.has_value()) {
    failed_ = why;
  }
  EndCallsLocked(*failed_);
  for (Peer& peer : peers_) {
    for (const Offer& offer : std::exchange(peer.offers, {})) {
      RefuseLocked(peer, offer.pull, *failed_);
    }
  }
}

void PeerGather::EndCallsLocked(const absl::Status& why) {
  for (const auto& [number, transfer] : std::exchange(transfers_, {})) {
    EndLocked(transfer->call, why);
  }
}

void PeerGather::EndLocked(const CallPtr& call, const absl::Status& why) {
  if (call->ended.has_value()) {
    return;
  }
  call->ended = why.ok() ? why
                         : absl::Status(why.code(),
                                        absl::StrCat("gather \"", call->label, "\" from other nodes: ", why.message()));
  ended_.push_back(call);
  woken_ = true;
}

void PeerGather::Run() {
  absl::MutexLock lock(&mutex_);
  const auto awake = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return woken_; };
  const auto idle = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return ended_.empty() && std::all_of(peers_.begin(), peers_.end(), [](const Peer& p) { return p.unsent == 0; });
  };
  for (;;) {
    while (FinishOne() || RefuseOne() || SendOne()) {
    }
    if (stopping_ && idle()) {
      return;
    }
    mutex_.Await(absl::Condition(&awake));
    woken_ = false;
  }
}

bool PeerGather::FinishOne() {
  const auto found = std::find_if(ended_.begin(), ended_.end(), [](const CallPtr& call) { return call->users == 0; });
  if (found == ended_.end()) {
    return false;
  }
  const CallPtr call = *found;
  ended_.erase(found);
  mutex_.Unlock();
  std::exchange(call->done, nullptr)(*call->ended);
  mutex_.Lock();
  return true;
}

std::string PeerGather::Overdue(absl::Time now, absl::Duration limit) const {
  absl::MutexLock lock(&mutex_);
  for (const auto& [number, transfer] : transfers_) {
    const Call& call = *transfer->call;
    const absl::Time since = std::max(transfer->asked, peers_[static_cast<size_t>(transfer->node)].heard);
    if (!call.ended.has_value() && now - since > limit) {
      return absl::StrCat("node ", transfer->node, " has not sent its part of group \"",
                          plan_->groups[static_cast<size_t>(call.group)].name, "\" of version ", call.version, " for ",
                          absl::FormatDuration(absl::Trunc(now - since, absl::Milliseconds(100))), " (got ",
                          transfer->received, " of ", Parts(call.group, transfer->node).bytes(), " bytes)");
    }
  }
  return "";
}

std::string PeerGather::Describe() const {
  absl::MutexLock lock(&mutex_);
  size_t offers = 0;
  for (const Peer& peer : peers_) {
    offers += peer.offers.size();
  }
  return absl::StrCat("parameters of ", row_nodes_, " nodes: ", received_bytes_, " bytes gathered, ", transfers_.size(),
                      " parts on their way here, ", offers, " asked of this node",
                      readable_ == 0 ? "; nothing may be read now" : "");
}

}  // namespace shardd
