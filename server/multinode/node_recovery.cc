// Who takes part in a job over several nodes, and how node 0 comes to the job's state where its daemon is a new one
// (node_coordinator.h). A link to a node is lost or comes, as node 0 takes it (OnDown, OnUp): LinkLoop::End in
// server/peer/link_loop.cc notices it, and other nodes take it in node_member_hears.cc.

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/plan/node_part.h"
#include "common/shm/ring.h"
#include "server/multinode/node_coordinator.h"
#include "server/multinode/other_attempts.h"

namespace shardd {
namespace {

constexpr uint64_t kMaxGeneration = std::numeric_limits<uint64_t>::max() / 2;  // there is always a next one

bool IsBehind(const v1::PeerMessage::Holds& one, const v1::PeerMessage::Holds& other) {
  return std::pair(one.step(), one.version()) < std::pair(other.step(), other.version());
}

// Likewise, also where machines that were cut off have made another version of that number: the later one is what the
// others have made without them.
bool IsEarlier(const v1::PeerMessage::Holds& one, const v1::PeerMessage::Holds& other) {
  const bool known = one.version() > 0 && other.version() > 0;  // older daemons do not say it
  if (!known || one.version() != other.version()) {
    return known ? one.version() < other.version() : IsBehind(one, other);
  }
  // Records of earlier builds do not say in which attempt they were made.
  if (one.version_generation() == 0 || other.version_generation() == 0) return one.step() < other.step();
  return one.version_generation() < other.version_generation();
}

// It has made the version in another attempt, without the others, who have made it anew.
bool IsOfAnother(const v1::PeerMessage::Holds& holds, uint64_t version, uint64_t generation) {
  return version > 0 && holds.version() == version && generation != 0 && holds.version_generation() != 0 &&
         holds.version_generation() != generation;
}

}  // namespace

void NodeCoordinator::TakeUp(v1::PeerMessage::Holds own) {
  // A job that takes another's place begins generations anew, and has what was made in the other's.
  generation_ = std::max({generation_, own.generation(), own.version_generation()});
  nodes_[0].has_state = own.initialized();
  nodes_[0].holds = std::move(own);
}

void NodeCoordinator::OnUp(int node) {
  Node& come = nodes_[static_cast<size_t>(node)];
  come.up = true;
  come.refused.clear();
  come.finished = come.fetching = false;
  come.held_step = 0;
  if (node != 0) {
    come.holds.reset();
    come.has_state = false;
  } else if (!come.holds.has_value()) {
    Admit(0);
  }
}

void NodeCoordinator::OnDown(int node, const absl::Status& why) {
  Node& gone = nodes_[static_cast<size_t>(node)];
  gone.holds.reset();
  gone.held_step = 0;
  gone.leaves = false;
  nodes_[0].leaves = false;  // its links go, and nobody is left to wait for that
  const bool was_up = std::exchange(gone.up, false);
  const bool took_part = std::exchange(gone.takes_part, false);
  const std::string lost = absl::StrCat(NodeText(node), " is lost: ", why.message());
  if (source_ == node) {
    source_ = -1;
    recover_(-1);
    NextGeneration(absl::AbortedError(lost));
  } else if (was_up && took_part && !gone.finished && !AwaitsLeaver()) {
    NextGeneration(absl::AbortedError(lost));
  }
  MaybeRecover();
}

void NodeCoordinator::SendBegin(int node, const absl::Status& cause) {
  v1::PeerMessage message;
  message.set_generation(generation_);
  v1::PeerMessage::Begin* begin = message.mutable_begin();
  begin->set_generation(generation_);
  begin->set_code(static_cast<int>(cause.code()));
  begin->set_message(std::string(cause.message()));
  begin->set_decided_step(decided_.step());
  begin->set_initialized(initialized_);
  begin->set_agreed_generation(agreed_generation_);
  begin->set_held_step(held_step_);
  begin->set_version(Version());
  begin->set_version_generation(version_generation_);
  if (decided_.step() > 0 && decided_known_) {
    *begin->mutable_decided() = decided_;
    begin->mutable_decided()->clear_ends_attempt();  // which has ended
  }
  send_(node, std::move(message));
}

void NodeCoordinator::Admit(int node) {
  nodes_[static_cast<size_t>(node)].takes_part = true;
  SendBegin(node, absl::OkStatus());
}

absl::Status NodeCoordinator::CheckHolds(int node, const v1::PeerMessage::Holds& holds) const {
  const Node& from = nodes_[static_cast<size_t>(node)];
  const bool finished = std::all_of(holds.finished().begin(), holds.finished().end(),
                                    [this](int n) { return n >= 0 && n < plan_->nodes(); });
  const bool held = holds.held_step() >= 0 && holds.held_step() <= holds.step();
  const bool decided = !holds.has_decided() || holds.decided().step() == holds.step();
  // Of rows, a node says it again when it has been sent its state, which node 0 may not know of.
  const bool twice = from.holds.has_value() && (!HasRows(*plan_) || IsBehind(holds, *from.holds));
  if (node == 0 || !from.up || twice || holds.generation() > kMaxGeneration ||
      holds.version_generation() > kMaxGeneration || holds.step() < 0 || holds.step() > kMaxUpdates ||
      (holds.step() > 0 && !holds.initialized()) || !held || !decided || !finished) {
    return absl::InvalidArgumentError(
        absl::StrCat(NodeText(node), " said what it cannot have, or said it twice (got step ", holds.step(),
                     holds.initialized() ? "" : " and no parameters", ", decided step ", holds.decided().step(),
                     ", generation ", holds.generation(), ")"));
  }
  return absl::OkStatus();
}

void NodeCoordinator::OnHolds(int node, const v1::PeerMessage::Holds& holds) {
  if (const absl::Status status = CheckHolds(node, holds); !status.ok()) {
    NextGeneration(status);
    return;
  }
  Node& from = nodes_[static_cast<size_t>(node)];
  const bool again = from.holds.has_value();
  from.holds = holds;
  const bool of_another = initialized_ && OthersMayGoOn(*plan_) && IsOfAnother(holds, Version(), version_generation_);
  from.has_state = holds.initialized() && !of_another;  // else it is sent the state
  if (again) {
    if (!of_another) OnHeld(node, holds.step());
    MaybeRecover();
    return;
  }
  for (const int other : holds.finished()) {
    if (!initialized_ && !nodes_[static_cast<size_t>(other)].up) {  // else it has come again
      nodes_[static_cast<size_t>(other)].finished = true;
    }
  }
  // Of an earlier daemon of node 0: one with the same number would not be told from it.
  const uint64_t theirs = std::max(holds.generation(), holds.version_generation());
  if (theirs > generation_ || (!initialized_ && theirs == generation_)) {
    generation_ = theirs;
    NextGeneration(absl::AbortedError(
        absl::StrCat(NodeText(node), " has been in a later generation than node 0, whose daemon is a new one")));
  }
  if ((initialized_ || !holds.initialized()) && !AwaitsLeaver()) {
    Admit(node);
  }
  if (!of_another) OnHeld(node, holds.step());
  MaybeRecover();
}

int NodeCoordinator::Latest() const {
  int latest = -1;
  for (size_t node = 0; node < nodes_.size(); ++node) {
    const auto& holds = nodes_[node].holds;
    const bool may_be = plan_->cut_over_nodes || !nodes_[node].finished;  // a replica may be freed, a part is not
    if (holds.has_value() && holds->initialized() && may_be &&
        (latest < 0 || IsEarlier(*nodes_[static_cast<size_t>(latest)].holds, *holds))) {
      latest = static_cast<int>(node);
    }
  }
  return latest;
}

int NodeCoordinator::Unheard() const {
  // Where parameters are cut over nodes, one that has finished serves the others, and knows what was agreed on.
  const auto unheard = [this](const Node& node) {
    return !node.holds.has_value() && (plan_->cut_over_nodes || !node.finished);
  };
  const auto found = std::find_if(nodes_.begin() + 1, nodes_.end(), unheard);
  return found == nodes_.end() ? -1 : static_cast<int>(found - nodes_.begin());
}

std::string NodeCoordinator::Lacking() const {
  const int latest = initialized_ ? -1 : Latest();
  if (latest < 0) {
    return "";
  }
  const std::string state = absl::StrCat("step ", nodes_[static_cast<size_t>(latest)].holds->step());
  if (source_ >= 0) {
    return absl::StrCat(NodeText(source_), " sends node 0, whose daemon is a new one, ", state);
  }
  const int unheard = Unheard();
  if (unheard < 0) {
    return "";  // about to be asked for
  }
  const Node& missing = nodes_[static_cast<size_t>(unheard)];
  return absl::StrCat(
      NodeText(unheard), missing.up ? "" : ", which has no link,",
      " has not said what it has of the job; node 0, whose daemon is a new one, waits for that before it "
      "goes on from ",
      state, " of node ", latest, missing.refused.empty() ? "" : ": ", missing.refused,
      "; start its daemon and its ranks, or close the job on all nodes and begin from a checkpoint");
}

// Whenever what nodes have said, or who may still say it, has changed.
void NodeCoordinator::MaybeRecover() {
  // Ranks that have trained are told that their state is lost when nobody else may have it.
  const auto tell_whom_it_hears = [this] {
    if (!HasRows(*plan_) || initialized_) return;
    const int unheard = Unheard();
    v1::PeerMessage message;
    message.set_generation(generation_);
    message.mutable_recovering()->set_waits_for(
        unheard < 0 ? "" : absl::StrCat(NodeText(unheard), " has not said what it has of the job"));
    for (size_t node = 1; node < nodes_.size(); ++node) {
      if (nodes_[node].takes_part) send_(static_cast<int>(node), message);
    }
  };
  int latest = initialized_ ? -1 : Latest();
  if (latest < 0) {
    tell_whom_it_hears();
    return;
  }
  const bool begins = source_ < 0 && Unheard() < 0;
  if (begins) {
    const v1::PeerMessage::Holds& of = *nodes_[static_cast<size_t>(latest)].holds;
    if (auto& own = nodes_[0].holds;
        own.has_value() && own->promised_version() > 0 && latest != 0 && of.version() == own->promised_version() &&
        of.step() == own->step() &&
        (of.version_generation() == 0 || of.version_generation() == own->generation() || !OthersMayGoOn(*plan_))) {
      own->set_version(own->promised_version());  // as another node has heard, all have agreed on what it promised
      own->set_version_generation(of.version_generation());
      latest = 0;
    }
    source_ = latest;
  }
  if (source_ == 0) {
    Recovered(nodes_[0].holds->step());
    return;
  }
  if (begins && nodes_[0].holds.has_value()) {  // which another node is ahead of
    nodes_[0].holds.reset();
    nodes_[0].has_state = false;
    nodes_[0].takes_part = true;
    if (!HasRows(*plan_)) SendBegin(0, absl::OkStatus());  // else it goes on at once
  }
  if (begins && HasRows(*plan_)) {
    Recovered(nodes_[static_cast<size_t>(source_)].holds->step());
    return;
  }
  v1::PeerMessage message;
  message.set_generation(generation_);
  message.mutable_recovering()->set_waits_for(source_ >= 0 ? "" : Lacking());
  for (size_t node = 1; node < nodes_.size(); ++node) {
    if (nodes_[node].holds.has_value() && !nodes_[node].takes_part) {
      send_(static_cast<int>(node), message);
    }
  }
  tell_whom_it_hears();
  if (begins) {
    recover_(source_);
  }
}

bool NodeCoordinator::MayRecover() const {
  return initialized_ ? HasRows(*plan_) && !nodes_[0].has_state : Unheard() >= 0 || Latest() >= 0;
}

void NodeCoordinator::Recovered(int64_t step) {
  const int source = std::exchange(source_, -1);
  const v1::PeerMessage::Holds& holds = *nodes_[static_cast<size_t>(source)].holds;
  initialized_ = true;
  agreed_generation_ = 0;
  values_agreed_ = holds.version() <= static_cast<uint64_t>(holds.step())
                       ? 0
                       : holds.version() - static_cast<uint64_t>(holds.step());
  version_generation_ = holds.version_generation();
  const auto is_of_another = [&](const v1::PeerMessage::Holds& of) {
    return OthersMayGoOn(*plan_) && IsOfAnother(of, holds.version(), version_generation_);
  };
  decided_ = holds.decided();
  for (const Node& node : nodes_) {  // who was sent the step may not know it
    const bool knows = node.holds.has_value() && node.holds->has_decided() && node.holds->step() == step;
    if (!holds.has_decided() && knows && !is_of_another(*node.holds)) decided_ = node.holds->decided();
  }
  decided_known_ = decided_.step() == step && step > 0;
  decided_.set_step(step);
  if (source == 0 || !HasRows(*plan_)) {  // else it is about to be sent its part
    nodes_[0].held_step = step;
    nodes_[0].has_state = true;
  }
  for (Node& node : nodes_) {
    node.takes_part = node.takes_part || node.holds.has_value();
    if (node.holds.has_value()) {
      const bool of_another = is_of_another(*node.holds);
      node.held_step = of_another ? 0 : std::min(step, node.holds->step());
      node.has_state = node.has_state && !of_another;
      held_step_ = std::max(held_step_, node.holds->held_step());
    }
  }
  NextGeneration(absl::AbortedError(absl::StrCat(NodeText(0), " has lost its ", source == 0 ? "daemon" : "state",
                                                 ", and goes on from step ", step, " of node ", source)));
  MaybeAllHold();
}

}  // namespace shardd
