// A node whose daemon was lost with its slabs gets what is committed from another, a replica: shards, the optimizer's
// state, counts. Node 0 gives it to the others, and gets it from one of them where it has lost its own. What is sent
// cannot change meanwhile, because no step is decided without the node.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/job/job_core.h"
#include "server/observe/log.h"

namespace shardd {

StateSlabs JobCore::SlabsOfState() const {
  return {{{v1::SLAB_SHARDS, memory_->shards(), plan_->memory.shards_bytes},
           {v1::SLAB_OPTIMIZER, memory_->optimizer(), plan_->memory.optimizer_bytes}}};
}

void JobCore::SendWaitedState() {
  for (const auto& [node, transfer] : nodes_->senders().TakeWaiting()) {
    NodeSendState(node, transfer);
  }
}

// Also a step that is not shown yet: the node that asks may be the one that is to hold it.
void JobCore::NodeSendState(int node, uint64_t transfer) {
  nodes_->senders().Stop(node);
  if (commits_.decision().committing() && !commits_.decision().applied()) {
    nodes_->senders().Await(node, transfer);
    return;
  }
  const int64_t ahead = commits_.decision().applied() ? 1 : 0;
  v1::PeerMessage::State state;
  state.set_transfer(transfer);
  state.set_step(committed_.step() + ahead);
  state.set_version(committed_.version() + static_cast<uint64_t>(ahead));
  for (size_t param = 0; param < committed_.step_counts().size(); ++param) {
    state.add_step_counts(committed_.step_counts()[param] + (commits_.decision().Applies(param) ? 1 : 0));
  }
  const StateSlabs slabs = SlabsOfState();
  events_.Add(-1, "state",
              absl::StrCat("step ", committed_.step() + ahead, " is sent to node ", node, ", ",
                           slabs[0].bytes + slabs[1].bytes, " bytes"));
  const auto failed = [weak = weak_from_this(), loop = loop_, node](const absl::Status& why) {
    loop->Post([weak, node, why] {
      if (const std::shared_ptr<JobCore> self = weak.lock(); self != nullptr && !self->closed_) {
        self->Close(absl::StrCat("state for node ", node, ": ", why.message()));
      }
    });
  };
  const auto trainer_state = [this](int rank) -> const std::string& {
    return commits_.decision().applied() ? commits_.steps().step(rank).trainer_state()
                                         : committed_.trainer_states()[rank];
  };
  nodes_->senders().Send(node, state, world_size(), trainer_state, slabs, failed, shared_from_this());
}

void JobCore::NodeStopSending(int node) { nodes_->senders().Stop(node); }

void JobCore::NodeBeginFetch(int from, uint64_t transfer) {
  if (closed_) {
    return;
  }
  if (commits_.decision().committing()) {  // a node is never so far behind
    Close("its state does not belong to the other nodes', which have another step");
    return;
  }
  committed_.Lose();  // from here on slabs are torn
  values_.BeginRestore();
  const std::shared_ptr<NodeFetch>& fetch = nodes_->BeginFetch(from, transfer, world_size());
  const auto ended = [weak = weak_from_this(), loop = loop_,
                      of = std::weak_ptr<NodeFetch>(fetch)](absl::Status status) {
    loop->Post([weak, of, status = std::move(status)] {
      const std::shared_ptr<JobCore> self = weak.lock();
      const std::shared_ptr<NodeFetch> fetch = of.lock();
      if (self == nullptr || self->closed_ || fetch == nullptr || self->nodes_->fetch() != fetch) {
        return;
      }
      if (!status.ok()) {
        self->Close(std::string(status.message()));
        return;
      }
      fetch->SlabsAreThere();
      self->Advance();
    });
  };
  nodes_->TakeBytes(fetch->Begin(SlabsOfState(), ended));
  // Behind what still writes initial values of an attempt that has ended.
  auto ask = [self = shared_from_this(), fetch, from, transfer] {
    if (!self->closed_ && self->nodes_->fetch() == fetch && self->nodes_->member().fetching()) {
      self->nodes_->AskForState(from, transfer);
    }
  };
  auto behind_worker = [self = shared_from_this(), ask = std::move(ask)] {
    self->nodes_->worker()->Post([self, ask] { self->loop_->Post(ask); });
  };
  values_.Behind(std::move(behind_worker));
}

void JobCore::NodeTakeRankState(const v1::PeerMessage::RankState& state) { nodes_->fetch()->TakeRankState(state); }

void JobCore::NodeTakeState(const v1::PeerMessage::State& state) {
  if (const absl::Status taken = nodes_->fetch()->TakeState(*plan_, state); !taken.ok()) {
    Close(std::string(taken.message()));
  }
}

bool JobCore::MayFinishRestore() const {
  return nodes_->fetch() != nullptr && nodes_->fetch()->complete() && nodes_->member().fetching();
}

void JobCore::FinishRestore() {
  const v1::PeerMessage::State& state = nodes_->fetch()->Take();
  auto cast =
      work_.Join(optimizer_devices_.count(), [this, fetch = nodes_->fetch(), &state](const absl::Status& status) {
        if (closed_ || nodes_->fetch() != fetch || !nodes_->member().fetching()) {
          return;
        }
        if (!status.ok()) {
          Close(absl::StrCat("state from node ", fetch->from(), ": ", status.message()));
          return;
        }
        committed_.Restore(state.step(), state.version(), {state.step_counts().begin(), state.step_counts().end()},
                           fetch->TakeTrainerStates());
        values_.Restored();
        events_.Add(
            -1, "state",
            absl::StrCat("step ", committed_.step(), " came from node ", fetch->from(), ", in ",
                         absl::FormatDuration(absl::Trunc(MonotonicNow() - fetch->began(), absl::Milliseconds(1)))));
        nodes_->EndFetch();
        nodes_->member().Restored();
      });
  DeviceOps ops(world_size());
  for (int rank = 0; rank < world_size(); ++rank) {
    ops[rank] = CommitOps(*plan_, memory_->pointers(), rank);
  }
  optimizer_devices_.Submit(absl::StrCat("cast step ", state.step()), optimizer_devices_.Divide(std::move(ops)), cast);
}

}  // namespace shardd
