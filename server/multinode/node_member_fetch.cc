// What a node has of the job, as it says on a link to node 0, and how it comes to what it has not (node_member.h).

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/plan/node_part.h"
#include "server/multinode/node_member.h"

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
void NodeMember::Fetch(int from, uint64_t generation) {
  if (plan_->cut_over_nodes) {
    const std::string why =
        absl::StrCat("the daemon of node ", node_, " (", plan_->config.nodes().addresses(node_),
                     ") has nothing of what other nodes have committed: it has ended since, or the ",
                     "job was opened anew there while others had the old one. What its ranks held ",
                     HasRows(*plan_) ? "is in another row of nodes, which does not send it" : "is nowhere else",
                     "; open the job anew on all nodes, from a checkpoint");
    Closing(why, /*finished=*/false);
    hear_.attempts->NodeClose(why);
    return;
  }
  promised_ = promised_values_ = false;
  adopting_ = 0;
  fetch_.under_way = told_ = true;
  fetch_.from = from;
  fetch_.generation = generation;
  hear_.attempts->NodeAbort(absl::AbortedError(absl::StrCat(Lacking(), "; attach again")));
  hear_.state->NodeBeginFetch(from, static_cast<uint64_t>(absl::ToUnixNanos(absl::Now())));
}

// Within a call of the coordinator.
void NodeMember::Recover(int from) {
  fetch_.under_way = false;
  if (from >= 0) {
    Fetch(from, 0);
  }
}

void NodeMember::Restored() {
  fetch_.under_way = false;
  if (coordinator_ != nullptr) {
    coordinator_->Recovered(facts_->NodeStep());  // the next generation is for this node, too
    return;
  }
  v1::PeerMessage message;
  message.mutable_fetched();
  links_->Send(0, std::move(message));
  Holding(facts_->NodeStep());
  Adopt(fetch_.generation);
}

std::string NodeMember::Lacking() const {
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
