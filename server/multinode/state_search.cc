#include "server/multinode/state_search.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/plan/node_part.h"
#include "server/multinode/reached_nodes.h"
#include "server/multinode/reduced_steps.h"

namespace shardd {

StateSearch::StateSearch(const ShardPlan* plan, int node, const ReachedNodes* reached)
    : plan_(plan), node_(node), reached_(reached) {}

// One that has lost it may be sent it by a third one behind its answer, which is then lost.
int StateSearch::AskedTimes() const { return plan_->nodes() > 2 * NodesOfRow(*plan_) ? 2 : 1; }

bool StateSearch::IsOfPlace(int node) const {
  return HasRows(*plan_) && node != node_ && node % NodesOfRow(*plan_) == node_ % NodesOfRow(*plan_);
}

bool StateSearch::has_come() const { return HasRows(*plan_) && under_way_ && all_here_; }

void StateSearch::Begin(int sender, const v1::PeerMessage::Begin& begin) {
  under_way_ = wanted_ = true;
  from_ = HasRows(*plan_) ? -1 : sender;
  generation_ = begin.generation();
  step_ = begin.decided_step();
  version_ = begin.version();
  version_generation_ = begin.version_generation();
  all_here_ = false;
  came_ = {};
  had_none_.clear();
  silent_.clear();
  asked_since_ = unanswered_since_ = absl::InfiniteFuture();
  BeginTransfer();
}

// Its number is of no transfer before, of an earlier daemon either.
void StateSearch::BeginTransfer() {
  transfer_ = std::max(transfer_ + 1, static_cast<uint64_t>(absl::ToUnixNanos(absl::Now())));
}

// Another node sends the state, so a link to node 0 that breaks and returns changes nothing but what node 0 knows: what
// it says is nothing that the sender lacks, because nothing is decided without this node. A daemon of node 0 never says
// less than before; another one may, which has heard all nodes: what the lost one had decided is then nowhere any more.
StateSearch::Next StateSearch::Hear(const v1::PeerMessage::Begin& begin, absl::Time now) {
  generation_ = begin.generation();  // of a new node 0, it may be less than what the lost one had said
  wanted_ = begin.initialized();
  const auto said = std::tuple(begin.decided_step(), begin.version(), begin.version_generation());
  const bool knows_version = begin.version() > 0 || begin.decided_step() != step_;
  if (begin.initialized() && knows_version) {
    if (said != std::tuple(step_, version_, version_generation_)) had_none_.clear();  // what they have may be that
    std::tie(step_, version_, version_generation_) = said;
  }
  const bool behind = came_.there && IsLess(came_);
  if (!behind && (all_here_ || from_ >= 0)) return Next::kWait;
  had_none_.clear();
  return Ask(now);
}

void StateSearch::CountFrom(uint64_t generation) { generation_ = std::max(generation_, generation); }

// Who is to be asked next, of those that may have it: the first one that has said least often that it has nothing, and
// rather one that was not silent. -1: none of them has a link.
int StateSearch::NextOfPlace() const {
  int next = -1;
  std::pair<bool, int> least;
  for (int node = 0; node < plan_->nodes(); ++node) {
    if (!IsOfPlace(node) || !reached_->reached(node)) continue;
    const auto said = had_none_.find(node);
    const std::pair<bool, int> rank(silent_.contains(node), said == had_none_.end() ? 0 : said->second);
    if (rank.second >= AskedTimes() || (next >= 0 && !(rank < least))) continue;
    least = rank;
    next = node;
  }
  return next;
}

StateSearch::Next StateSearch::Ask(absl::Time now) {
  const bool sends = !std::exchange(all_here_, false);
  came_ = {};
  const int before = std::exchange(from_, NextOfPlace());
  if (before >= 0 && before != from_ && sends && reached_->reached(before)) passed_over_ = before;
  if (from_ >= 0) {
    BeginTransfer();
    asked_since_ = now;
    unanswered_since_ = std::min(unanswered_since_, now);
    return Next::kAsk;
  }
  unanswered_since_ = absl::InfiniteFuture();
  for (int node = 0; node < plan_->nodes(); ++node) {
    const auto said = had_none_.find(node);
    if (IsOfPlace(node) && (said == had_none_.end() || said->second < AskedTimes())) return Next::kWait;
  }
  return Next::kNoneHas;
}

int StateSearch::TakePassedOver() { return std::exchange(passed_over_, -1); }

void StateSearch::OnUp(int node) {
  if (!IsOfPlace(node)) return;
  had_none_.clear();
  silent_.erase(node);
}

bool StateSearch::OnDown(int node) {
  if (!IsOfPlace(node)) return false;
  had_none_.clear();  // it may have sent one that said so what it had
  if (!Awaits(node) || all_here_) return false;
  unanswered_since_ = absl::InfiniteFuture();
  return true;
}

// A daemon of an earlier build does not answer; others do as soon as they know what is committed. Who is silent is
// asked again where nobody else may have it.
StateSearch::Next StateSearch::CheckSilence(absl::Time now, absl::Duration limit) {
  if (!HasRows(*plan_) || !under_way_ || all_here_ || from_ < 0) return Next::kWait;
  if (now - unanswered_since_ >= absl::Milliseconds(plan_->config.grace_ms())) {
    silent_.insert(from_);
    return Next::kSilent;
  }
  if (now - asked_since_ < limit) return Next::kWait;
  asked_since_ = now;
  if (!silent_.insert(from_).second) silent_ = {from_};
  return NextOfPlace() != from_ ? Ask(now) : Next::kWait;
}

bool StateSearch::IsStale(const v1::PeerMessage::State& state) const {
  return HasRows(*plan_) && state.transfer() != transfer_;
}

bool StateSearch::IsLess(const State& state) const {
  if (state.version == 0 || version_ == 0) return state.version == 0 || state.step < step_;
  if (state.version != version_) return state.version < version_;
  // Records of earlier builds do not say in which attempt they were made.
  if (state.generation == 0 || version_generation_ == 0) return state.step < step_;
  return state.generation != version_generation_;
}

// It has lost its own; or its custodian has kept one of before it was cut off and replaced.
bool StateSearch::Lacks(const v1::PeerMessage::State& state) {
  if (!HasRows(*plan_) || !IsLess({true, state.step(), state.version(), state.version_generation()})) return false;
  CountAsNone();
  return true;
}

void StateSearch::CountAsNone() {
  ++had_none_[from_];
  unanswered_since_ = absl::InfiniteFuture();
}

void StateSearch::Takes(const v1::PeerMessage::State& state, absl::Time now) {
  const bool as_said = state.version_generation() == 0 && state.version() == version_;
  came_ = {true, state.step(), state.version(), as_said ? version_generation_ : state.version_generation()};
  Comes(now);
}

void StateSearch::Comes(absl::Time now) {
  if (from_ < 0 || all_here_) return;  // it is of one that is asked no more
  asked_since_ = unanswered_since_ = now;
  silent_.clear();
}

void StateSearch::Came(int64_t step, uint64_t version, uint64_t generation) {
  all_here_ = true;
  if (generation == 0 && version == version_) generation = version_generation_;
  came_ = {true, step, version, generation};
}

std::string StateSearch::Text() const {
  if (from_ >= 0) return absl::StrCat("the node's state is being brought from ", NodeText(*plan_, from_));
  return "the node's state is brought from a node that holds the same in another row, once one of them has a link";
}

std::string StateSearch::Names(const std::set<int>* only) const {
  std::string names;
  for (int node = 0; node < plan_->nodes(); ++node) {
    if (!IsOfPlace(node) || (only != nullptr && !only->contains(node))) continue;
    absl::StrAppend(&names, names.empty() ? "" : ", ", NodeText(*plan_, node));
  }
  return names;
}

std::string StateSearch::WhereItWas(Next why) const {
  if (why == Next::kSilent) {
    return absl::StrCat("What its ranks held is in other rows on ", Names(&silent_),
                        ", and nothing of it has come for ",
                        absl::FormatDuration(absl::Milliseconds(plan_->config.grace_ms())),
                        "; a daemon there may hang, or be of an earlier build");
  }
  const bool several = plan_->nodes() > 2 * NodesOfRow(*plan_);
  return absl::StrCat("What its ranks held has been in other rows on ", Names(nullptr),
                      several ? ", whose daemons have lost it, too, or have another state than the others go on from"
                              : ", whose daemon has lost it, too, or has another state than the others go on from");
}

}  // namespace shardd
