// What other nodes say to this one, and what links say of them.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/plan/node_part.h"
#include "server/loop/core_loop.h"
#include "server/multinode/node_member.h"
#include "server/multinode/other_attempts.h"

namespace shardd {

void NodeMember::ToMember(int node, v1::PeerMessage message) {
  if (node != 0) {
    links_->Send(node, std::move(message));
    return;
  }
  loop_->Post([this, alive = alive_, message = std::move(message)] {
    if (*alive) {
      FromCoordinator(message);
      hear_.attempts->Advance();
    }
  });
}

void NodeMember::OnUp(int node) {
  HearUp(node);
  hear_.attempts->Advance();
}

void NodeMember::OnMessage(int node, const v1::PeerMessage& message) {
  Hear(node, message);
  hear_.attempts->Advance();
}

void NodeMember::OnDown(int node, const absl::Status& why) {
  HearDown(node, why);
  hear_.attempts->Advance();
}

void NodeMember::HearUp(int node) {
  reached_.OnUp(node);
  finished_.erase(node);
  search_.OnUp(node);
  for (v1::PeerMessage& message : std::exchange(kept_, {})) {
    Say(std::move(message));
  }
  if (coordinator_ != nullptr) {
    coordinator_->OnUp(node);
  } else if (node == 0) {
    SayHolds(/*again=*/false);
  }
  if (fetching() && search_.from() < 0 && !search_.has_come()) GoOnSearching(search_.Ask(MonotonicNow()));
  hear_.attempts->NodeIsUp();
}

void NodeMember::HearDown(int node, const absl::Status& why) {
  const bool was_up = reached_.OnDown(node, why.message(), MonotonicNow());
  // Who trains already is not ended by another user's job in a place that a lost daemon has left.
  if (absl::IsFailedPrecondition(why) || (absl::IsPermissionDenied(why) && !facts_->NodeInitialized())) {
    hear_.attempts->NodeClose(
        absl::StrCat("node ", node, " (", plan_->config.nodes().addresses(node), "): ", why.message()));
    return;
  }
  hear_.state->NodeStopSending(node);
  const bool sent_state = search_.OnDown(node);
  if (coordinator_ != nullptr) coordinator_->OnDown(node, why);
  if (node == 0 && was_up) HearNode0Down(why);
  if (sent_state) GoOnSearching(search_.Ask(MonotonicNow()));
  // Sums that another node than 0 was needed for fail, and node 0 hears of it.
}

void NodeMember::HearNode0Down(const absl::Status& why) {
  heard_ = node0_fetches_ = false;
  search_.SetMayExist(false);
  if (!HasRows(*plan_)) search_.End();  // the next link begins it anew
  node0_waits_.clear();
  unheard_since_ = MonotonicNow();
  if (!ended_ && !promised_ && generation_ != 0 && (!node0_finished_ || said_)) {
    told_ = true;  // nobody is there to be told
    const std::string node0 = absl::StrCat("node 0 (", plan_->config.nodes().addresses(0), ")");
    hear_.attempts->NodeAbort(node0_finished_ ? absl::FailedPreconditionError(absl::StrCat(
                                                    node0, " has finished and takes part in nothing any more"))
                                              : absl::AbortedError(absl::StrCat(node0, " is lost: ", why.message())));
  }
}

// Its own ranks are told over there; the ones here would wait for it.
void NodeMember::OnRefused(int node, const absl::Status& why) {
  reached_.SetWhy(node, why.message());
  if (absl::IsUnavailable(why)) return;  // one of the two is about to be what the other is
  // As in HearDown: who has not the secret ends nothing of a job that trains.
  if (coordinator_ != nullptr && !(absl::IsPermissionDenied(why) && facts_->NodeInitialized())) {
    coordinator_->OnRefused(node, why);
  }
}

void NodeMember::Hear(int node, const v1::PeerMessage& message) {
  if (message.kind_case() == v1::PeerMessage::kClosing) {
    if (!message.closing().finished()) {
      hear_.attempts->NodeClose(absl::StrCat("node ", node, " (", plan_->config.nodes().addresses(node),
                                             ") has closed it: ", message.closing().why()));
      return;
    }
    node0_finished_ = node0_finished_ || node == 0;
    finished_.insert(node);
    if (node == 0) {
      AllHold(facts_->NodeStep());  // it has shown all that it has decided
    }
    if (coordinator_ != nullptr) {
      coordinator_->OnFinished(node);
    }
    return;
  }
  if (message.has_state() || message.has_rank_state()) {
    HearState(node, message);
  } else if (message.has_fetch() && message.fetch().transfer() == 0) {
    hear_.state->NodeStopSending(node);  // it asks another one
  } else if (message.has_fetch() && HasRows(*plan_)) {
    if (search_.IsOfPlace(node)) hear_.state->NodeSendState(node, message.fetch().transfer());
  } else if (message.has_fetch() && (coordinator_ != nullptr || node == 0)) {
    if (coordinator_ != nullptr) coordinator_->SetFetching(node, true);
    if (facts_->NodeInitialized()) hear_.state->NodeSendState(node, message.fetch().transfer());
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
  if (message.has_recovering()) {
    search_.SetMayExist(heard_ && !message.recovering().waits_for().empty());
    if (heard_) return;
    node0_waits_ = message.recovering().waits_for();
    node0_fetches_ = node0_waits_.empty();
    return;
  }
  if (message.generation() != generation_ || ended_ || adopting_ != 0) {
    return;
  }
  switch (message.kind_case()) {
    case v1::PeerMessage::kGo:
      hear_.sums->NodeGo(message.go());
      return;
    case v1::PeerMessage::kAllClosed:
      hear_.sums->NodesClosed(message.all_closed().backwards());
      return;
    case v1::PeerMessage::kDecided:
      if (message.decided().part()) {
        const bool awaited = std::exchange(says_part_, false);
        if (awaited && message.decided().step() == facts_->NodeStep() + 1) hear_.steps->NodeDecided(message.decided());
        return;
      }
      if (promised_ && !promised_values_ && message.decided().step() == facts_->NodeStep() + 1) {
        said_ = promised_ = false;
        decided_ = message.decided();
        awaits_next_ = plan_->cut_over_nodes && !decided_.ends_attempt().empty();
        hear_.steps->NodeDecided(message.decided());
      }
      return;
    case v1::PeerMessage::kValuesAgreed:
      if (promised_values_ && heard_) {  // else it is of the link before, and Begin says it
        HearAgreed();
      }
      return;
    case v1::PeerMessage::kMayWrite:
      may_write_ = message.may_write();
      return;
    case v1::PeerMessage::kMayExtend:
      hear_.attempts->NodesExtend(message.may_extend().made());
      return;
    default:
      return;
  }
}

void NodeMember::HearAgreed() {
  said_ = promised_ = promised_values_ = false;
  may_write_.Clear();
  hear_.steps->NodeValuesAgreed();
}

void NodeMember::AllHold(int64_t step) { held_step_ = std::max(held_step_, step); }

// The version behind the one that this node has cannot be made without what it has promised. It is so also where node
// 0's daemon is another one by now, which knows the version and not the generation. An older daemon does not say it.
bool NodeMember::AgreesOnPromised(const v1::PeerMessage::Begin& begin) const {
  if (!promised_values_ || !begin.initialized() || begin.decided_step() != facts_->NodeStep()) {
    return false;
  }
  // Who was cut off with a promise, and replaced meanwhile, may meet others that have made another version without it.
  const uint64_t agreed_in = begin.version_generation() != 0 ? begin.version_generation() : begin.agreed_generation();
  if (agreed_in != 0 && agreed_in != generation_ && OthersMayGoOn(*plan_)) return false;
  return begin.version() == 0 ? begin.agreed_generation() == generation_ : begin.version() == facts_->NodeVersion() + 1;
}

void NodeMember::OnBegin(const v1::PeerMessage::Begin& begin) {
  const bool answers = !std::exchange(heard_, true);  // what the node holds, and not an end
  bool agreed_meanwhile = false;
  // Who was cut off, and replaced meanwhile, has promised or made the decided step, or the version, in another attempt,
  // with other sums or values. An older daemon does not say in which it was made.
  const auto differ = [](uint64_t one, uint64_t other) { return one != 0 && other != 0 && one != other; };
  const uint64_t decided_in = begin.decided().generation();
  const bool made_another = (decided_.step() == begin.decided_step() && facts_->NodeStep() == begin.decided_step() &&
                             differ(decided_.generation(), decided_in)) ||
                            (OthersMayGoOn(*plan_) && begin.version() == facts_->NodeVersion() &&
                             differ(facts_->NodeVersionGeneration(), begin.version_generation()));
  const auto makes_promised = [&] {
    return promised_ && !promised_values_ && begin.has_decided() && begin.decided_step() == facts_->NodeStep() + 1 &&
           (begin.version() == 0 || begin.version() == facts_->NodeVersion() + 1) && !differ(decided_in, generation_);
  };
  if (begin.has_decided()) {
    decided_ = begin.decided();
  }
  if (answers) {
    node0_finished_ = node0_fetches_ = false;
    node0_waits_.clear();
  }
  search_.SetMayExist(!begin.initialized());
  if (HasRows(*plan_) && fetching()) {
    GoOnSearching(search_.Hear(begin, MonotonicNow()));
    return;
  }
  if (HasRows(*plan_) && facts_->NodeInitialized() && !begin.initialized()) {
    heard_ = false;  // it was said before the state came, which node 0 is about to hear of
    return;
  }
  if (answers) {
    if (makes_promised()) {
      said_ = promised_ = false;
      hear_.steps->NodeDecided(begin.decided());
    } else if (AgreesOnPromised(begin)) {
      agreed_meanwhile = true;
      HearAgreed();
    } else if (begin.initialized() &&
               (made_another || !facts_->NodeInitialized() || facts_->NodeStep() < begin.decided_step() ||
                facts_->NodeVersion() < begin.version())) {
      Fetch(0, begin);
      return;
    } else if (begin.decided_step() != facts_->NodeStep() || begin.initialized() != facts_->NodeInitialized() ||
               (begin.version() != 0 && begin.version() != facts_->NodeVersion())) {
      hear_.attempts->NodeClose(
          absl::StrCat("the nodes' states do not belong together: this node has ",
                       facts_->NodeInitialized() ? absl::StrCat("step ", facts_->NodeStep()) : "no parameters",
                       " and node 0 ", begin.initialized() ? absl::StrCat("step ", begin.decided_step()) : "none",
                       "; open the job anew on all nodes, from a checkpoint"));
      return;
    }
  } else if ((coordinator_ == nullptr || HasRows(*plan_)) && begin.initialized() && !facts_->NodeInitialized() &&
             !fetching()) {
    Fetch(0, begin);  // node 0 has been sent the state that this node lacks, too; or, of rows, knows of it
    return;
  }
  if (fetching()) {
    search_.CountFrom(begin.generation());
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
  // Its attempt was given up with the link, or behind a decided step nothing has begun.
  if (answers && !promised_ && !agreed_meanwhile) {
    Adopt(begin.generation());
    return;
  }
  adopting_ = begin.generation();
  told_ = true;
  promised_ = promised_values_ = false;
  // Values are nothing that a rank counts: those of the other nodes, which attach again, write them anew. So do these.
  const absl::string_view lost = agreed_meanwhile
                                     ? "the link to node 0 was lost before it said that all have written the same"
                                     : "the link to node 0 was lost before what was promised was decided";
  hear_.attempts->NodeAbort(begin.code() == 0 ? absl::AbortedError(lost)
                                              : absl::Status(NodeErrorCode(begin.code()), begin.message()));
}

}  // namespace shardd
