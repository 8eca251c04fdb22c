#include "server/multinode/state_senders.h"

#include "server/peer/peer_links.h"

namespace shardd {

void StateSenders::Send(int node, const v1::PeerMessage::State& state, int ranks,
                        absl::FunctionRef<const std::string&(int rank)> trainer_state, const StateSlabs& slabs,
                        StateSender::Failed failed, std::shared_ptr<void> keep) {
  Stop(node);
  for (int rank = 0; rank < ranks; ++rank) {
    v1::PeerMessage message;
    message.mutable_rank_state()->set_transfer(state.transfer());
    message.mutable_rank_state()->set_rank(rank);
    message.mutable_rank_state()->set_trainer_state(trainer_state(rank));
    links_->Send(node, std::move(message));
  }
  v1::PeerMessage message;
  *message.mutable_state() = state;
  links_->Send(node, std::move(message));
  senders_[node] =
      StateSender::Start(state.transfer(), slabs, links_, node, worker_, std::move(failed), std::move(keep));
}

void StateSenders::Stop(int node) {
  waiting_.erase(node);
  if (const auto sender = senders_.extract(node); !sender.empty()) {
    sender.mapped()->Cancel();
  }
}

void StateSenders::StopAll() {
  waiting_.clear();
  for (const auto& [node, sender] : std::exchange(senders_, {})) {
    sender->Cancel();
  }
}

}  // namespace shardd
