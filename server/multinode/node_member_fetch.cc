// What a node has of the job, as it says on a link to node 0, and how it comes to what it has not (node_member.h).

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/plan/node_part.h"
#include "server/loop/monotonic_now.h"
#include "server/multinode/node_member.h"
#include "server/multinode/reduced_steps.h"

namespace shardd {
// Of rows, what another node has sent counts when all of it has come: from then on nobody else may have it.
v1::PeerMessage::Holds NodeMember::OwnHolds() const {
  const StateSearch::State own = search_.has_come()
                                     ? search_.came()
                                     : StateSearch::State{facts_->NodeInitialized(), facts_->NodeStep(),
                                                          facts_->NodeVersion(), facts_->NodeVersionGeneration()};
  v1::PeerMessage::Holds holds;
  holds.set_generation(std::max(generation_, adopting_));
  holds.set_initialized(own.there);
  holds.set_step(own.step);
  holds.set_version(own.version);
  holds.set_version_generation(own.generation);
  if (promised_values_) holds.set_promised_version(own.version + 1);
  if (decided_.step() > 0 && decided_.step() == own.step) {
    *holds.mutable_decided() = decided_;
    holds.mutable_decided()->clear_ends_attempt();  // which has ended
  }
  holds.set_held_step(std::min(held_step_, own.step));
  holds.mutable_finished()->Add(finished_.begin(), finished_.end());
  return holds;
}

void NodeMember::SayHolds(bool again) {
  if (again && !links_->takes_fetch_ends(0)) {  // an older daemon would end the attempt of all nodes
    links_->Renew(0);
    return;
  }
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
  if (!begin.has_decided()) decided_.Clear();  // it is of the attempt that is dropped here
  adopting_ = 0;
  told_ = true;
  search_.Begin(from, begin);
  hear_.attempts->NodeAbort(absl::AbortedError(absl::StrCat(Lacking(), "; attach again")));
  if (HasRows(*plan_)) {
    GoOnSearching(search_.Ask(MonotonicNow()));
    return;
  }
  hear_.state->NodeBeginFetch(from, search_.transfer());
}

void NodeMember::EndForWantOfState(absl::string_view where) {
  const std::string why = absl::StrCat("the daemon of node ", node_, " (", plan_->config.nodes().addresses(node_),
                                       ") has nothing of what other nodes have committed: it has ended since, or the ",
                                       "job was opened anew there while others had the old one. ", where,
                                       "; open the job anew on all nodes, from a checkpoint");
  search_.End();
  Closing(why, /*finished=*/false);
  hear_.attempts->NodeClose(why);
}

bool NodeMember::GoOnSearching(StateSearch::Next next) {
  if (const int over = search_.TakePassedOver(); over >= 0 && links_->takes_fetch_ends(over)) {
    v1::PeerMessage ends;
    ends.mutable_fetch()->set_transfer(0);
    links_->Send(over, std::move(ends));
  }
  if (next == StateSearch::Next::kWait) return true;
  if (next == StateSearch::Next::kAsk) {
    hear_.state->NodeBeginFetch(search_.from(), search_.transfer());
    return true;
  }
  // Node 0 knows what there is, so the search waits for a link to it.
  if (next == StateSearch::Next::kNoneHas && !heard_) return true;
  if (next == StateSearch::Next::kNoneHas && !search_.wanted()) {  // all begin anew
    search_.End();
    hear_.state->NodeEndFetch();
    Adopt(search_.generation());
    return true;
  }
  EndForWantOfState(search_.WhereItWas(next));
  return false;
}

// Of the node that was asked.
void NodeMember::HearState(int node, const v1::PeerMessage& message) {
  if (!search_.Awaits(node)) return;
  if (message.has_rank_state()) {
    hear_.state->NodeTakeRankState(message.rank_state());
    return;
  }
  if (search_.IsStale(message.state())) return;
  if (search_.Lacks(message.state())) {
    GoOnSearching(search_.Ask(MonotonicNow()));
    return;
  }
  search_.Takes(message.state(), MonotonicNow());
  hear_.state->NodeTakeState(message.state());
}

// Within a call of the coordinator.
void NodeMember::Recover(int from) {
  search_.End();
  if (from >= 0) {
    Fetch(from, {});
  }
}

void NodeMember::StateCame() {
  // Node 0 may have been told over this link that this node has nothing: a new one that counts what nodes have would go
  // on without what has come.
  const bool counts_without = coordinator_ == nullptr && HasRows(*plan_) && (!heard_ || !search_.wanted());
  if (counts_without && search_.has_come() && reached_.reached(0)) SayHolds(/*again=*/true);
}

void NodeMember::Restored() {
  // Nobody was left to tell node 0, which has heard all nodes, of what has come, and so no rank has seen it.
  if (search_.is_ahead() && heard_) {
    search_.CountAsNone();
    GoOnSearching(search_.Ask(MonotonicNow()));
    return;
  }
  search_.End();
  if (coordinator_ != nullptr && !HasRows(*plan_)) {
    coordinator_->Recovered(facts_->NodeStep());  // the next generation is for this node, too
    return;
  }
  if (coordinator_ != nullptr) {
    coordinator_->SetFetching(0, false, facts_->NodeStep());
  } else if (HasRows(*plan_) && (!heard_ || !search_.wanted())) {
    // Node 0 may have been told over this link that this node has nothing; it begins with what it is told now.
    if (reached_.reached(0)) SayHolds(/*again=*/true);
    return;
  } else {
    v1::PeerMessage message;
    message.mutable_fetched();
    links_->Send(0, std::move(message));
    Holding(facts_->NodeStep());
  }
  Adopt(search_.generation());
}

std::string NodeMember::Lacking() const {
  if (fetching()) return search_.Text();
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
