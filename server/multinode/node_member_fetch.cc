// What a node has of the job, as it says on a link to node 0, and how it comes to what it has not (node_member.h).

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/plan/node_part.h"
#include "server/loop/monotonic_now.h"
#include "server/multinode/node_member.h"
#include "server/multinode/reduced_steps.h"

namespace shardd {

v1::PeerMessage::Holds NodeMember::OwnHolds() const {
  v1::PeerMessage::Holds holds;
  holds.set_generation(std::max(generation_, adopting_));
  holds.set_initialized(facts_->NodeInitialized());
  holds.set_step(facts_->NodeStep());
  holds.set_version(facts_->NodeVersion());
  if (promised_values_) holds.set_promised_version(facts_->NodeVersion() + 1);
  if (decided_.step() > 0 && decided_.step() == facts_->NodeStep()) {
    *holds.mutable_decided() = decided_;
    holds.mutable_decided()->clear_ends_attempt();  // which has ended
  }
  holds.set_held_step(std::min(held_step_, facts_->NodeStep()));
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

// The first node that has said least often that it has nothing. A node that has lost its state may be sent it by a
// third one behind its answer, which is then lost: so where there are several, all are asked twice, while no link of
// theirs is lost, before nobody has it.
void NodeMember::AskOtherRows() {
  fetch_.from = -1;
  fetch_.all_here = false;
  std::vector<int> places;
  for (int node = 0; node < plan_->nodes(); ++node) {
    if (HasPlaceHere(node)) places.push_back(node);
  }
  const int rounds = places.size() > 1 ? 2 : 1;
  bool some_may_have_it = false;
  int fewest = rounds;
  for (const int node : places) {
    const int times = fetch_.had_none[node];
    some_may_have_it = some_may_have_it || times < rounds;
    if (times >= fewest || !links_state_[static_cast<size_t>(node)].up) continue;
    fewest = times;
    fetch_.from = node;
  }
  if (!some_may_have_it) {
    std::string others;
    for (const int node : places) absl::StrAppend(&others, others.empty() ? "" : ", ", NodeText(*plan_, node));
    EndForWantOfState(
        absl::StrCat("What its ranks held has been in other rows on ", others,
                     places.size() > 1 ? ", whose daemons have lost it, too" : ", whose daemon has lost it, too"));
    return;
  }
  if (fetch_.from < 0) return;  // until one of them has a link
  fetch_.transfer = static_cast<uint64_t>(absl::ToUnixNanos(absl::Now()));
  fetch_.unanswered_since = MonotonicNow();
  hear_.state->NodeBeginFetch(fetch_.from, fetch_.transfer);
}

// Of the node that was asked.
void NodeMember::HearState(int node, const v1::PeerMessage& message) {
  if (!fetch_.under_way || node != fetch_.from) return;
  if (message.has_rank_state()) {
    hear_.state->NodeTakeRankState(message.rank_state());
    return;
  }
  const v1::PeerMessage::State& state = message.state();
  if (HasRows(*plan_) && state.transfer() != fetch_.transfer) return;
  fetch_.unanswered_since = absl::InfiniteFuture();
  if (HasRows(*plan_) && state.version() == 0) {
    ++fetch_.had_none[node];
    AskOtherRows();
    return;
  }
  if (HasRows(*plan_) && std::pair(state.step(), state.version()) < std::pair(fetch_.step, fetch_.version)) {
    EndForWantOfState(absl::StrCat(NodeText(*plan_, node), " has step ", state.step(), ", version ", state.version(),
                                   ", and node 0 has said step ", fetch_.step, ", version ", fetch_.version));
    return;
  }
  hear_.state->NodeTakeState(state);
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
