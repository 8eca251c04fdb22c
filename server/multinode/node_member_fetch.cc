// What a node has of the job, as it says on a link to node 0, and how it comes to what it has not (node_member.h).

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/plan/node_part.h"
#include "server/loop/monotonic_now.h"
#include "server/multinode/node_member.h"
#include "server/multinode/reduced_steps.h"

namespace shardd {
namespace {

// How often nodes of a place are asked before nobody has its state. One that has lost it may be sent it by a third one
// behind its answer, which is then lost.
int AskedTimes(const ShardPlan& plan) { return plan.nodes() > 2 * NodesOfRow(plan) ? 2 : 1; }

}  // namespace

// Of rows, what another node has sent counts when all of it has come: from then on nobody else may have it.
NodeMember::State NodeMember::Own() const {
  if (has_come()) return fetch_.came;
  return {facts_->NodeInitialized(), facts_->NodeStep(), facts_->NodeVersion()};
}

v1::PeerMessage::Holds NodeMember::OwnHolds() const {
  const State own = Own();
  v1::PeerMessage::Holds holds;
  holds.set_generation(std::max(generation_, adopting_));
  holds.set_initialized(own.there);
  holds.set_step(own.step);
  holds.set_version(own.version);
  if (promised_values_) holds.set_promised_version(own.version + 1);
  if (decided_.step() > 0 && decided_.step() == own.step) {
    *holds.mutable_decided() = decided_;
    holds.mutable_decided()->clear_ends_attempt();  // which has ended
  }
  holds.set_held_step(std::min(held_step_, own.step));
  holds.mutable_finished()->Add(finished_.begin(), finished_.end());
  return holds;
}

void NodeMember::SayHolds() {
  v1::PeerMessage message;
  *message.mutable_holds() = OwnHolds();
  links_->Send(0, std::move(message));
}

// What ranks have begun here is another job's beginning, or a step that others have behind them.
void NodeMember::Fetch(int from, const v1::PeerMessage::Begin& begin) {
  // Who enters a pass promises what its trainers have stored, and would wait for the node that asks it for its state.
  const bool in_trainers = plan_->config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER;
  if (plan_->cut_over_nodes && (!HasRows(*plan_) || in_trainers)) {
    EndForWantOfState(HasRows(*plan_) ? "What its ranks held is in another row of nodes, which does not send it where "
                                        "optimizers step in the trainers"
                                      : "What its ranks held is nowhere else");
    return;
  }
  promised_ = promised_values_ = false;
  adopting_ = 0;
  fetch_ = {};
  fetch_.under_way = told_ = true;
  fetch_.from = from;
  fetch_.generation = begin.generation();
  fetch_.step = begin.decided_step();
  fetch_.version = begin.version();
  if (HasRows(*plan_)) fetch_.from = -1;
  hear_.attempts->NodeAbort(absl::AbortedError(absl::StrCat(Lacking(), "; attach again")));
  if (HasRows(*plan_)) {
    AskOtherRows();
    return;
  }
  hear_.state->NodeBeginFetch(from, static_cast<uint64_t>(absl::ToUnixNanos(absl::Now())));
}

// Of rows. Another node sends the state, so a link to node 0 that breaks and returns changes nothing but what node 0
// knows: what it says is nothing that the sender lacks, because nothing is decided without this node.
void NodeMember::HearWhileFetching(const v1::PeerMessage::Begin& begin) {
  fetch_.generation = begin.generation();  // of a new node 0, it may be less than what the lost one had said
  fetch_.wanted = begin.initialized();
  const auto said = std::pair(begin.decided_step(), begin.version());
  if (begin.initialized() && std::pair(fetch_.step, fetch_.version) < said) {
    std::tie(fetch_.step, fetch_.version) = said;
  }
  const bool behind = std::pair(fetch_.came.step, fetch_.came.version) < std::pair(fetch_.step, fetch_.version);
  if (fetch_.all_here ? behind : fetch_.from < 0) {
    fetch_.had_none.clear();
    AskOtherRows();
  }
}

void NodeMember::EndForWantOfState(absl::string_view where) {
  const std::string why = absl::StrCat("the daemon of node ", node_, " (", plan_->config.nodes().addresses(node_),
                                       ") has nothing of what other nodes have committed: it has ended since, or the ",
                                       "job was opened anew there while others had the old one. ", where,
                                       "; open the job anew on all nodes, from a checkpoint");
  fetch_.under_way = false;
  Closing(why, /*finished=*/false);
  hear_.attempts->NodeClose(why);
}

bool NodeMember::HasPlaceHere(int node) const {
  return HasRows(*plan_) && node != node_ && node % NodesOfRow(*plan_) == node_ % NodesOfRow(*plan_);
}

// Who is to be asked next, of those that may have it: the first one that has said least often that it has nothing, and
// rather one that was not silent. -1: none of them has a link.
int NodeMember::NextOfPlace() const {
  int next = -1;
  std::pair<bool, int> least;
  for (int node = 0; node < plan_->nodes(); ++node) {
    if (!HasPlaceHere(node) || !links_state_[static_cast<size_t>(node)].up) continue;
    const auto said = fetch_.had_none.find(node);
    const std::pair<bool, int> rank(fetch_.silent.contains(node), said == fetch_.had_none.end() ? 0 : said->second);
    if (rank.second >= AskedTimes(*plan_) || (next >= 0 && !(rank < least))) continue;
    least = rank;
    next = node;
  }
  return next;
}

// All of those that have a link, before nobody has it.
void NodeMember::AskOtherRows() {
  fetch_.all_here = false;
  std::vector<int> places;
  for (int node = 0; node < plan_->nodes(); ++node) {
    if (HasPlaceHere(node)) places.push_back(node);
  }
  const bool some_may_have_it = std::any_of(places.begin(), places.end(),
                                            [this](int node) { return fetch_.had_none[node] < AskedTimes(*plan_); });
  fetch_.from = NextOfPlace();
  if (fetch_.from >= 0) {
    fetch_.transfer = static_cast<uint64_t>(absl::ToUnixNanos(absl::Now()));
    fetch_.asked_since = MonotonicNow();
    fetch_.unanswered_since = std::min(fetch_.unanswered_since, fetch_.asked_since);
    hear_.state->NodeBeginFetch(fetch_.from, fetch_.transfer);
    return;
  }
  fetch_.unanswered_since = absl::InfiniteFuture();
  if (some_may_have_it || !heard_) return;  // until one of them has a link; or node 0, which knows what there is
  if (!fetch_.wanted) {
    fetch_.under_way = false;
    hear_.state->NodeEndFetch();
    Adopt(fetch_.generation);
    return;
  }
  std::string others;
  for (const int node : places) absl::StrAppend(&others, others.empty() ? "" : ", ", NodeText(*plan_, node));
  EndForWantOfState(absl::StrCat("What its ranks held has been in other rows on ", others,
                                 places.size() > 1 ? ", whose daemons have lost it, too, or have an older state"
                                                   : ", whose daemon has lost it, too, or has an older state"));
}

// A daemon of an earlier build does not answer; others do as soon as they know what is committed. Who is silent is
// asked again where nobody else may have it.
void NodeMember::CheckSender(absl::Time now, absl::Duration limit) {
  const absl::Duration grace = absl::Milliseconds(plan_->config.grace_ms());
  if (!HasRows(*plan_) || !fetch_.under_way || fetch_.all_here || fetch_.from < 0) return;
  if (now - fetch_.unanswered_since >= grace) {
    fetch_.silent.insert(fetch_.from);
    std::string silent;
    for (const int node : fetch_.silent) absl::StrAppend(&silent, silent.empty() ? "" : ", ", NodeText(*plan_, node));
    EndForWantOfState(absl::StrCat("What its ranks held is in other rows on ", silent,
                                   ", and nothing of it has come for ", absl::FormatDuration(grace),
                                   "; a daemon there may hang, or be of an earlier build"));
    return;
  }
  if (now - fetch_.asked_since < limit) return;
  fetch_.asked_since = now;
  if (!fetch_.silent.insert(fetch_.from).second) fetch_.silent = {fetch_.from};
  if (NextOfPlace() != fetch_.from) AskOtherRows();
}

// Of the node that was asked.
void NodeMember::HearState(int node, const v1::PeerMessage& message) {
  if (!fetch_.under_way || node != fetch_.from) return;
  if (message.has_rank_state()) {
    hear_.state->NodeTakeRankState(message.rank_state());
    return;
  }
  const v1::PeerMessage::State& state = message.state();
  if (HasRows(*plan_)) {
    if (state.transfer() != fetch_.transfer) return;
    // It has lost its own; or its custodian has kept one of before it was cut off and replaced.
    if (std::pair(state.step(), state.version()) < std::pair(fetch_.step, std::max(fetch_.version, uint64_t{1}))) {
      ++fetch_.had_none[node];
      fetch_.unanswered_since = absl::InfiniteFuture();
      AskOtherRows();
      return;
    }
  }
  StateComes();
  hear_.state->NodeTakeState(state);
}

void NodeMember::StateComes() {
  fetch_.asked_since = fetch_.unanswered_since = MonotonicNow();
  fetch_.silent.clear();
}

void NodeMember::StateCame(int64_t step, uint64_t version) {
  fetch_.all_here = true;
  fetch_.came = {true, step, version};
}

// Within a call of the coordinator.
void NodeMember::Recover(int from) {
  fetch_.under_way = false;
  if (from >= 0) {
    Fetch(from, {});
  }
}

void NodeMember::Restored() {
  fetch_.under_way = false;
  if (coordinator_ != nullptr && !HasRows(*plan_)) {
    coordinator_->Recovered(facts_->NodeStep());  // the next generation is for this node, too
    return;
  }
  if (coordinator_ != nullptr) {
    coordinator_->SetFetching(0, false, facts_->NodeStep());
  } else if (HasRows(*plan_) && (!heard_ || !fetch_.wanted)) {
    // Node 0 may have been told over this link that this node has nothing; it begins with what it is told now.
    if (links_state_[0].up) SayHolds();
    return;
  } else {
    v1::PeerMessage message;
    message.mutable_fetched();
    links_->Send(0, std::move(message));
    Holding(facts_->NodeStep());
  }
  Adopt(fetch_.generation);
}

std::string NodeMember::Lacking() const {
  if (fetch_.under_way && fetch_.from < 0) {
    return "the node's state is brought from a node that holds the same in another row, once one of them has a link";
  }
  if (fetch_.under_way) {
    return absl::StrCat("the node's state is being brought from node ", fetch_.from, " (",
                        plan_->config.nodes().addresses(fetch_.from), ")");
  }
  if (awaits_next_ && ended_) {
    return "another daemon takes the place of one that holds parts of the parameters";
  }
  if (coordinator_ != nullptr && !coordinator_->Lacking().empty()) {
    return coordinator_->Lacking();
  }
  if (facts_->NodeStep() > held_step_) {
    const std::string step =
        absl::StrCat("step ", facts_->NodeStep(), " is decided, and not shown before all nodes hold it");
    return coordinator_ == nullptr ? absl::StrCat(step, "; node 0 (", plan_->config.nodes().addresses(0),
                                                  heard_ ? ")" : "), which has no link,", " has not said that they do")
                                   : absl::StrCat(step, "; ", coordinator_->Unheld());
  }
  return "";
}

}  // namespace shardd
