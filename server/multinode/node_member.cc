#include "server/multinode/node_member.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace shardd {

NodeMember::NodeMember(std::shared_ptr<const ShardPlan> plan, int node, CoreLoop* loop, PeerLinks* links,
                       std::shared_ptr<NodeEvents> events, NodeJob* job)
    : plan_(std::move(plan)),
      node_(node),
      loop_(loop),
      links_(links),
      events_(std::move(events)),
      job_(job),
      links_state_(static_cast<size_t>(plan_->nodes())) {
  if (node_ == 0) {
    coordinator_ = std::make_unique<NodeCoordinator>(
        plan_, static_cast<uint64_t>(absl::ToUnixMillis(absl::Now())),
        [this](int to, v1::PeerMessage message) { ToMember(to, std::move(message)); },
        // Behind what the coordinator was called with. What came in between may have ended the generation, also where
        // the member has yet to hear of that.
        [this] {
          loop_->Post([this, alive = alive_, generation = coordinator_->generation()] {
            if (*alive && generation == coordinator_->generation() && generation == generation_ && !ended_ &&
                promised_) {
              std::vector<v1::PeerMessage::Reduced> reduced;
              for (int of = 0; of < plan_->nodes(); ++of) reduced.push_back(coordinator_->reduced(of));
              job_->NodesReduced(reduced);
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

void NodeMember::Start() {
  unheard_since_ = MonotonicNow();
  links_state_[static_cast<size_t>(node_)].up = true;
  if (coordinator_ != nullptr) {
    coordinator_->OnUp(0);
  }
  events_->SetListener(this);
}

// What the job says -------------------------------------------------------------------------------------------------

// Whoever says that it gives waits for a Go, with which all send to all. Node 0 has heard from every other by then.
bool NodeMember::ReachesOthers() const {
  return node_ == 0 || std::all_of(links_state_.begin(), links_state_.end(), [](const Link& link) { return link.up; });
}

void NodeMember::Say(v1::PeerMessage message) {
  if (!heard_ || ended_ || adopting_ != 0 || (!message.has_abandoned() && !ReachesOthers())) {
    kept_.push_back(std::move(message));
    return;
  }
  message.set_generation(generation_);
  said_ = true;
  promised_values_ = promised_values_ || message.has_values();
  promised_ = promised_ || promised_values_ || message.has_reduced();
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

void NodeMember::Decide(const v1::PeerMessage::Decided& decided) {
  promised_ = false;
  coordinator_->Decide(decided);
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
  said_ = promised_ = promised_values_ = false;
  if (adopting_ != 0) {
    Adopt(std::exchange(adopting_, 0));
    return;
  }
  if (!ended_) {
    Tell(cause);
    ended_ = true;
    job_->NodeGeneration(generation_ + 1);  // whichever comes next is that, or later
  }
}

void NodeMember::Adopt(uint64_t generation) {
  generation_ = generation;
  ended_ = told_ = false;
  job_->NodeGeneration(generation);
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

std::string NodeMember::Unreached() const {
  for (int node = 0; node < plan_->nodes(); ++node) {
    const Link& link = links_state_[static_cast<size_t>(node)];
    if (!link.up) {
      return absl::StrCat("node ", node, " (", plan_->config.nodes().addresses(node), ") is not reached",
                          link.why.empty() ? "" : ": ", link.why);
    }
  }
  return "";
}

// What others say ---------------------------------------------------------------------------------------------------

void NodeMember::ToMember(int node, v1::PeerMessage message) {
  if (node != 0) {
    links_->Send(node, std::move(message));
    return;
  }
  loop_->Post([this, alive = alive_, message = std::move(message)] {
    if (*alive) {
      FromCoordinator(message);
    }
  });
}

void NodeMember::OnUp(int node) {
  links_state_[static_cast<size_t>(node)] = {true, ""};
  finished_.erase(node);
  for (v1::PeerMessage& message : std::exchange(kept_, {})) {
    Say(std::move(message));
  }
  if (coordinator_ != nullptr) {
    coordinator_->OnUp(node);
  } else if (node == 0) {
    SayHolds();
  }
  job_->NodeIsUp();
}

void NodeMember::OnDown(int node, const absl::Status& why) {
  Link& link = links_state_[static_cast<size_t>(node)];
  const bool was_up = std::exchange(link.up, false);
  link.why = std::string(why.message());
  // Who trains already is not ended by another user's job in a place that a lost daemon has left.
  if (absl::IsFailedPrecondition(why) || (absl::IsPermissionDenied(why) && !job_->NodeInitialized())) {
    job_->NodeClose(absl::StrCat("node ", node, " (", plan_->config.nodes().addresses(node), "): ", why.message()));
    return;
  }
  if (coordinator_ != nullptr) {
    job_->NodeStopSending(node);
    coordinator_->OnDown(node, why);
    return;
  }
  if (node != 0 || !was_up) {
    return;  // sums that it was needed for fail, and node 0 hears of it
  }
  job_->NodeStopSending(0);
  heard_ = false;
  fetching_ = node0_fetches_ = false;  // the next link begins it anew
  node0_waits_.clear();
  unheard_since_ = MonotonicNow();
  if (!ended_ && !promised_ && generation_ != 0 && (!node0_finished_ || said_)) {
    told_ = true;  // nobody is there to be told
    const std::string node0 = absl::StrCat("node 0 (", plan_->config.nodes().addresses(0), ")");
    job_->NodeAbort(node0_finished_ ? absl::FailedPreconditionError(
                                          absl::StrCat(node0, " has finished and takes part in nothing any more"))
                                    : absl::AbortedError(absl::StrCat(node0, " is lost: ", why.message())));
  }
}

// Its own ranks are told over there; the ones here would wait for it.
void NodeMember::OnRefused(int node, const absl::Status& why) {
  links_state_[static_cast<size_t>(node)].why = std::string(why.message());
  if (coordinator_ != nullptr) {
    coordinator_->OnRefused(node, why);
  }
}

void NodeMember::OnMessage(int node, const v1::PeerMessage& message) {
  if (message.kind_case() == v1::PeerMessage::kClosing) {
    if (!message.closing().finished()) {
      job_->NodeClose(absl::StrCat("node ", node, " (", plan_->config.nodes().addresses(node),
                                   ") has closed it: ", message.closing().why()));
      return;
    }
    node0_finished_ = node0_finished_ || node == 0;
    finished_.insert(node);
    if (node == 0) {
      AllHold(job_->NodeStep());  // it has shown all that it has decided
    }
    if (coordinator_ != nullptr) {
      coordinator_->OnFinished(node);
    }
    return;
  }
  if (message.has_state() || message.has_rank_state()) {
    if (!fetching_ || node != fetches_from_) {
      return;
    }
    if (message.has_state()) {
      job_->NodeTakeState(message.state());
    } else {
      job_->NodeTakeRankState(message.rank_state());
    }
  } else if (message.has_fetch() && (coordinator_ != nullptr || node == 0)) {
    if (coordinator_ != nullptr) coordinator_->SetFetching(node, true);
    if (job_->NodeInitialized()) job_->NodeSendState(node, message.fetch().transfer());
  } else if (coordinator_ != nullptr && message.has_fetched()) {
    coordinator_->SetFetching(node, false);
  } else if (coordinator_ != nullptr) {
    coordinator_->OnMessage(node, message);
  } else if (node == 0) {
    FromCoordinator(message);
  }
}

void NodeMember::FromCoordinator(const v1::PeerMessage& message) {
  if (message.kind_case() == v1::PeerMessage::kBegin) {
    OnBegin(message.begin());
    AllHold(message.begin().held_step());
    return;
  }
  if (message.has_all_hold()) {
    AllHold(message.all_hold().step());
    return;
  }
  if (message.has_recovering() && !heard_) {
    node0_waits_ = message.recovering().waits_for();
    node0_fetches_ = node0_waits_.empty();
    return;
  }
  if (message.generation() != generation_ || ended_ || adopting_ != 0) {
    return;
  }
  switch (message.kind_case()) {
    case v1::PeerMessage::kGo:
      job_->NodeGo(message.go());
      return;
    case v1::PeerMessage::kAllClosed:
      job_->NodesClosed(message.all_closed().backwards());
      return;
    case v1::PeerMessage::kDecided:
      if (promised_ && !promised_values_ && message.decided().step() == job_->NodeStep() + 1) {
        said_ = promised_ = false;
        decided_ = message.decided();
        job_->NodeDecided(message.decided());
      }
      return;
    case v1::PeerMessage::kValuesAgreed:
      if (promised_values_) {
        said_ = promised_ = promised_values_ = false;
        job_->NodeValuesAgreed();
      }
      return;
    default:
      return;
  }
}

void NodeMember::AllHold(int64_t step) {
  if (step > held_step_) {
    held_step_ = step;
    job_->NodeHeld();
  }
}

void NodeMember::OnBegin(const v1::PeerMessage::Begin& begin) {
  const bool answers = !std::exchange(heard_, true);  // what the node holds, and not an end
  if (begin.has_decided()) {
    decided_ = begin.decided();
  }
  if (answers) {
    node0_finished_ = node0_fetches_ = false;
    node0_waits_.clear();
    if (promised_ && !promised_values_ && begin.has_decided() && begin.decided_step() == job_->NodeStep() + 1) {
      said_ = promised_ = false;
      job_->NodeDecided(begin.decided());
    } else if (promised_values_ && begin.initialized() && begin.agreed_generation() == generation_) {
      said_ = promised_ = promised_values_ = false;
      job_->NodeValuesAgreed();
    } else if (begin.initialized() && (!job_->NodeInitialized() || job_->NodeStep() < begin.decided_step())) {
      Fetch(0, begin.generation());
      return;
    } else if (begin.decided_step() != job_->NodeStep() || begin.initialized() != job_->NodeInitialized()) {
      job_->NodeClose(absl::StrCat("the nodes' states do not belong together: this node has ",
                                   job_->NodeInitialized() ? absl::StrCat("step ", job_->NodeStep()) : "no parameters",
                                   " and node 0 ",
                                   begin.initialized() ? absl::StrCat("step ", begin.decided_step()) : "none",
                                   "; open the job anew on all nodes, from a checkpoint"));
      return;
    }
  } else if (coordinator_ == nullptr && begin.initialized() && !job_->NodeInitialized() && !fetching_) {
    Fetch(0, begin.generation());  // node 0 has been sent the state that this node lacks, too
    return;
  }
  if (fetching_) {
    fetched_generation_ = std::max(fetched_generation_, begin.generation());
    return;
  }
  const uint64_t counts = std::max(generation_, adopting_);
  if (begin.generation() <= counts && !(answers && begin.generation() == counts)) {
    return;
  }
  if (ended_ || generation_ == 0) {
    Adopt(begin.generation());
    return;
  }
  if (answers && !promised_ && adopting_ != 0) {  // the one before that still ends, behind a commit
    adopting_ = begin.generation();
    return;
  }
  if (answers && !promised_) {  // its attempt was given up with the link, or behind a decided step nothing has begun
    Adopt(begin.generation());
    return;
  }
  adopting_ = begin.generation();
  told_ = true;
  promised_ = promised_values_ = false;
  job_->NodeAbort(begin.code() == 0 ? absl::AbortedError("the link to node 0 was lost before the step was decided")
                                    : absl::Status(NodeErrorCode(begin.code()), begin.message()));
}

void NodeMember::Describe(v1::Job* out) const {
  for (int node = 0; node < plan_->nodes(); ++node) {
    const Link& link = links_state_[static_cast<size_t>(node)];
    v1::Node* described = out->add_nodes();
    described->set_index(node);
    described->set_address(plan_->config.nodes().addresses(node));
    described->set_state(link.up ? "up" : absl::StrCat("down: ", link.why.empty() ? "not reached yet" : link.why));
    described->set_here(node == node_);
    if (node != node_) {
      const PeerTraffic traffic = links_->traffic(node);
      described->set_bytes_sent(traffic.sent_bytes);
      described->set_bytes_received(traffic.received_bytes);
    }
  }
}

void NodeMember::CheckSilence(absl::Time now, absl::Duration limit) {
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
  job_->NodeAbort(absl::DeadlineExceededError(absl::StrCat(waits, " (limit ", absl::FormatDuration(limit), ")")));
}

std::string NodeMember::WaitText() const {
  if (coordinator_ != nullptr) {
    return coordinator_->Waiting();
  }
  if (heard_) {
    return job_->NodeStep() > held_step_ ? Lacking() : "";
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
                      links_state_[0].why.empty() ? "" : ": ", links_state_[0].why);
}

}  // namespace shardd
