#include "server/multinode/node_member.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/loop/core_loop.h"
#include "server/multinode/reduced_steps.h"
#include "server/observe/duration_histogram.h"

namespace shardd {

NodeMember::NodeMember(std::shared_ptr<const ShardPlan> plan, int node, CoreLoop* loop, PeerLinks* links,
                       std::shared_ptr<NodeEvents> events, const NodeFacts* facts)
    : plan_(std::move(plan)),
      node_(node),
      loop_(loop),
      links_(links),
      events_(std::move(events)),
      facts_(facts),
      reached_(plan_.get(), node),
      search_(plan_.get(), node, &reached_) {
  if (node_ == 0) {
    coordinator_ = std::make_unique<NodeCoordinator>(
        plan_, static_cast<uint64_t>(absl::ToUnixMillis(absl::Now())),
        [this](int to, v1::PeerMessage message) { ToMember(to, std::move(message)); },
        // Behind what the coordinator was called with. What came in between may have ended the generation, also where
        // the member has yet to hear of that.
        [this] {
          loop_->Post([this, alive = alive_, generation = coordinator_->generation()] {
            if (*alive && generation == coordinator_->generation() && generation == generation_ && !ended_ &&
                (promised_ || says_part_)) {
              std::vector<v1::PeerMessage::Reduced> reduced;
              for (int of = 0; of < plan_->nodes(); ++of) reduced.push_back(coordinator_->reduced(of));
              hear_.steps->NodesReduced(reduced);
              hear_.attempts->Advance();
            }
          });
        },
        [this](int from) { Recover(from); });
  }
}

void NodeMember::Stop() {
  *alive_ = false;
  events_->SetListener(nullptr);
}

void NodeMember::TakeUp(NodeLeft left) {
  decided_ = std::move(left.decided);
  if (left.promised_in > 0) {  // node 0 promises values alone
    generation_ = left.promised_in;
    said_ = promised_ = true;
    promised_values_ = left.promised_values;
  }
  if (coordinator_ != nullptr) {
    coordinator_->TakeUp(OwnHolds());
  }
}

void NodeMember::Start(NodeListeners listeners) {
  hear_ = listeners;
  unheard_since_ = MonotonicNow();
  reached_.Start(unheard_since_);
  if (coordinator_ != nullptr) {
    coordinator_->OnUp(0);
  }
  events_->SetListener(this);
}

// What the job says -------------------------------------------------------------------------------------------------

void NodeMember::Say(v1::PeerMessage message) {
  // Whoever says that it gives waits for a Go, with which all send to all. Node 0 has heard from every other by then.
  const bool reaches_others = node_ == 0 || reached_.all();
  if (!heard_ || ended_ || adopting_ != 0 || (!message.has_abandoned() && !reaches_others)) {
    kept_.push_back(std::move(message));
    return;
  }
  message.set_generation(generation_);
  said_ = true;
  promised_values_ = promised_values_ || message.has_values();
  says_part_ = message.has_reduced() && message.reduced().part();
  promised_ = promised_ || promised_values_ || (message.has_reduced() && !says_part_);
  if (coordinator_ == nullptr) {
    links_->Send(0, std::move(message));
    return;
  }
  loop_->Post([this, alive = alive_, message = std::move(message)] {
    if (*alive) {
      coordinator_->OnMessage(0, message);
    }
  });
}

void NodeMember::Ready(v1::PeerMessage::Ready ready) {
  v1::PeerMessage message;
  *message.mutable_ready() = std::move(ready);
  Say(std::move(message));
}

void NodeMember::Closed(v1::PeerMessage::Closed closed) {
  v1::PeerMessage message;
  *message.mutable_closed() = std::move(closed);
  Say(std::move(message));
}

void NodeMember::Reduced(v1::PeerMessage::Reduced reduced) {
  v1::PeerMessage message;
  *message.mutable_reduced() = std::move(reduced);
  Say(std::move(message));
}

void NodeMember::Values(v1::PeerMessage::Values values) {
  v1::PeerMessage message;
  *message.mutable_values() = std::move(values);
  Say(std::move(message));
}

void NodeMember::AsksToWrite(v1::PeerMessage::AsksToWrite asks) {
  if (asks.times() == 1) may_write_.Clear();  // what was heard is of the version before
  v1::PeerMessage message;
  asks.set_version(facts_->NodeVersion() + 1);
  *message.mutable_asks_to_write() = std::move(asks);
  Say(std::move(message));
}

void NodeMember::Extends(v1::PeerMessage::Extends extends) {
  v1::PeerMessage message;
  extends.set_version(facts_->NodeVersion());
  *message.mutable_extends() = std::move(extends);
  Say(std::move(message));
}

void NodeMember::Decide(const v1::PeerMessage::Decided& decided) {
  promised_ = false;
  awaits_next_ = plan_->cut_over_nodes && !decided.ends_attempt().empty();
  coordinator_->Decide(decided);
}

void NodeMember::DecidePart(const v1::PeerMessage::Decided& decided) {
  says_part_ = false;
  coordinator_->DecidePart(decided);
}

void NodeMember::Holding(int64_t step) {
  if (coordinator_ != nullptr) {
    return;  // Decide has said it
  }
  v1::PeerMessage message;
  message.mutable_held()->set_step(step);
  links_->Send(0, std::move(message));  // where there is no link, Holds says it on the next one
}

// Once in a generation.
void NodeMember::Tell(const absl::Status& cause) {
  if (std::exchange(told_, true) || !heard_) {
    return;
  }
  v1::PeerMessage message;
  message.mutable_abandoned()->set_code(static_cast<int>(cause.code()));
  message.mutable_abandoned()->set_message(std::string(cause.message()));
  Say(std::move(message));
}

void NodeMember::WantsToEnd(const absl::Status& cause) { Tell(cause); }

void NodeMember::AttemptEnded(const absl::Status& cause) {
  kept_.clear();
  said_ = promised_ = promised_values_ = says_part_ = false;
  may_write_.Clear();
  if (adopting_ != 0) {
    Adopt(std::exchange(adopting_, 0));
    return;
  }
  if (!ended_) {
    Tell(cause);
    ended_ = true;
    hear_.attempts->NodeGeneration(generation_ + 1);  // whichever comes next is that, or later
  }
}

void NodeMember::Adopt(uint64_t generation) {
  generation_ = generation;
  ended_ = told_ = awaits_next_ = false;
  may_write_.Clear();
  hear_.attempts->NodeGeneration(generation);
  for (v1::PeerMessage& message : std::exchange(kept_, {})) {
    Say(std::move(message));
  }
}

void NodeMember::Closing(const std::string& why, bool finished) {
  v1::PeerMessage message;
  message.mutable_closing()->set_why(why);
  message.mutable_closing()->set_finished(finished);
  if (finished && coordinator_ != nullptr) {
    coordinator_->OnFinished(0);  // who is in a step is told that it comes to nothing
  }
  for (int node = 0; node < plan_->nodes(); ++node) {
    if (node != node_) {
      links_->Send(node, message);
    }
  }
}

bool NodeMember::OthersFinished() const {
  for (int node = 0; node < plan_->nodes(); ++node) {
    if (node != node_ && finished_.count(node) == 0) return false;
  }
  return true;
}

void NodeMember::Describe(v1::Job* out) const {
  for (int node = 0; node < plan_->nodes(); ++node) {
    v1::Node* described = out->add_nodes();
    described->set_index(node);
    described->set_address(plan_->config.nodes().addresses(node));
    const std::string& why = reached_.why(node);
    described->set_state(reached_.reached(node) ? "up" : absl::StrCat("down: ", why.empty() ? "not reached yet" : why));
    described->set_here(node == node_);
    if (node != node_) {
      const PeerTraffic traffic = links_->traffic(node);
      described->set_protocol_version(links_->protocol_version(node));
      described->set_bytes_sent(traffic.sent_bytes);
      described->set_bytes_received(traffic.received_bytes);
    }
  }
}

void NodeMember::CheckSilence(absl::Time now, absl::Duration limit) {
  if (!GoOnSearching(search_.CheckSilence(now, limit))) return;
  if (coordinator_ != nullptr) {
    coordinator_->CheckSilence(now, limit);
    return;
  }
  if (node0_fetches_) {
    unheard_since_ = now;
  }
  // A promise of a job that is cut over nodes lasts as long as the job does: nobody could give the step to this node.
  if (heard_ || now - unheard_since_ < limit || (promised_ ? plan_->cut_over_nodes : kept_.empty())) {
    return;
  }
  const std::string waits = WaitText();
  unheard_since_ = now;
  // Whoever has committed the promised step gives it to this node, too.
  promised_ = promised_values_ = false;
  hear_.attempts->NodeAbort(
      absl::DeadlineExceededError(absl::StrCat(waits, " (limit ", absl::FormatDuration(limit), ")")));
}

std::string NodeMember::WaitText() const {
  if (coordinator_ != nullptr) {
    return coordinator_->Waiting();
  }
  if (heard_) {
    return facts_->NodeStep() > held_step_ ? Lacking() : "";
  }
  if (node0_fetches_) {
    return absl::StrCat("node 0 (", plan_->config.nodes().addresses(0),
                        "), whose daemon is a new one, is sent the state");
  }
  if (!node0_waits_.empty()) {
    return node0_waits_;
  }
  return absl::StrCat("node 0 (", plan_->config.nodes().addresses(0), ") has not been reached for ",
                      absl::FormatDuration(absl::Trunc(MonotonicNow() - unheard_since_, absl::Milliseconds(100))),
                      reached_.why(0).empty() ? "" : ": ", reached_.why(0));
}

}  // namespace shardd
