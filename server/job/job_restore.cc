// A node whose daemon was lost with its slabs gets what is committed from another, a replica: shards, the optimizer's
// state, counts. Node 0 gives it to the others, and gets it from one of them where it has lost its own. What is sent
// cannot change meanwhile, because no step is decided without the node.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/shm/ring.h"
#include "server/job/job_core.h"
#include "server/observe/log.h"

namespace shardd {

StateSlabs JobCore::SlabsOfState() const {
  return {{{v1::SLAB_SHARDS, memory_->shards(), plan_->memory.shards_bytes},
           {v1::SLAB_OPTIMIZER, memory_->optimizer(), plan_->memory.optimizer_bytes}}};
}

void JobCore::SendWaitedState() {
  for (const auto& [node, transfer] : std::exchange(wait_for_state_, {})) {
    NodeSendState(node, transfer);
  }
}

// Also a step that is not shown yet: the node that asks may be the one that is to hold it.
void JobCore::NodeSendState(int node, uint64_t transfer) {
  NodeStopSending(node);
  if (committing_ && !applied_) {
    wait_for_state_[node] = transfer;
    return;
  }
  const int64_t ahead = applied_ ? 1 : 0;
  for (int rank = 0; rank < world_size(); ++rank) {
    v1::PeerMessage message;
    message.mutable_rank_state()->set_transfer(transfer);
    message.mutable_rank_state()->set_rank(rank);
    message.mutable_rank_state()->set_trainer_state(applied_ ? ranks_[rank].step.trainer_state()
                                                             : trainer_states_[rank]);
    node_links_->Send(node, std::move(message));
  }
  v1::PeerMessage message;
  v1::PeerMessage::State* state = message.mutable_state();
  state->set_transfer(transfer);
  state->set_step(committed_step_ + ahead);
  state->set_version(version_ + static_cast<uint64_t>(ahead));
  for (size_t param = 0; param < step_counts_.size(); ++param) {
    state->add_step_counts(step_counts_[param] + (applied_ && decided_.present[param] ? 1 : 0));
  }
  node_links_->Send(node, std::move(message));
  const StateSlabs slabs = SlabsOfState();
  Event(-1, "state",
        absl::StrCat("step ", committed_step_ + ahead, " is sent to node ", node, ", ", slabs[0].bytes + slabs[1].bytes,
                     " bytes"));
  const auto failed = [weak = weak_from_this(), loop = loop_, node](const absl::Status& why) {
    loop->Post([weak, node, why] {
      if (const std::shared_ptr<JobCore> self = weak.lock(); self != nullptr && !self->closed_) {
        self->Close(absl::StrCat("state for node ", node, ": ", why.message()));
      }
    });
  };
  senders_[node] =
      StateSender::Start(transfer, slabs, node_links_.get(), node, node_worker_, failed, shared_from_this());
}

void JobCore::NodeStopSending(int node) {
  wait_for_state_.erase(node);
  if (const auto found = senders_.find(node); found != senders_.end()) {
    found->second->Cancel();
    senders_.erase(found);
  }
}

void JobCore::NodeBeginFetch(int from, uint64_t transfer) {
  if (closed_) {
    return;
  }
  if (committing_) {  // a node is never so far behind
    Close("its state does not belong to the other nodes', which have another step");
    return;
  }
  // From here on slabs are torn. Should the state not come, and nobody have any: as what an attempt at initial values
  // wrote that was given up, for the next to clear.
  had_parameters_ = had_parameters_ || version_ > 0;
  version_ = 0;
  committed_step_ = 0;
  step_counts_.assign(step_counts_.size(), 0);
  trainer_states_.assign(trainer_states_.size(), "");
  for (size_t p = 0; p < plan_->params.size(); ++p) {
    for (int what = 0; what <= plan_->optimizer_states; ++what) {
      if (WrittenPart(plan_->params[p], what).slab != nullptr) {
        initial_writes_[{static_cast<int>(p), what}] = epoch_ - 1;
      }
    }
  }
  restore_ = std::make_shared<Restore>();
  restore_->from = from;
  restore_->trainer_states.resize(world_size());
  const auto done = [weak = weak_from_this(), loop = loop_,
                     of = std::weak_ptr<Restore>(restore_)](absl::Status status) {
    loop->Post([weak, of, status = std::move(status)] {
      const std::shared_ptr<JobCore> self = weak.lock();
      const std::shared_ptr<Restore> restore = of.lock();
      if (self == nullptr || self->closed_ || restore == nullptr || self->restore_ != restore) {
        return;
      }
      if (!status.ok()) {
        self->Close(std::string(status.message()));
        return;
      }
      restore->all_slabs = true;
      self->MaybeFinishRestore();
    });
  };
  restore_->slabs = std::make_shared<NodeRestore>(transfer, SlabsOfState(), done);
  node_events_->SetState(
      [slabs = restore_->slabs, from](int node, const v1::PeerData& header, absl::string_view elements) {
        if (node == from) slabs->Take(header, elements);
      });
  AskForState(from, transfer);
}

// Behind what still writes initial values of an attempt that has ended.
void JobCore::AskForState(int from, uint64_t transfer) {
  auto ask = [self = shared_from_this(), restore = restore_, from, transfer] {
    if (!self->closed_ && self->restore_ == restore && self->nodes_->fetching()) {
      v1::PeerMessage message;
      message.mutable_fetch()->set_transfer(transfer);
      self->node_links_->Send(from, std::move(message));
    }
  };
  auto behind_worker = [self = shared_from_this(), ask = std::move(ask)] {
    self->node_worker_->Post([self, ask] { self->loop_->Post(ask); });
  };
  copier_->Post(std::move(behind_worker));
}

void JobCore::NodeTakeRankState(const v1::PeerMessage::RankState& state) {
  if (state.transfer() == restore_->slabs->transfer() && state.rank() >= 0 && state.rank() < world_size() &&
      static_cast<int64_t>(state.trainer_state().size()) <= kMaxTrainerStateBytes) {
    restore_->trainer_states[state.rank()] = state.trainer_state();
  }
}

void JobCore::NodeTakeState(const v1::PeerMessage::State& state) {
  if (state.transfer() != restore_->slabs->transfer()) {
    return;
  }
  const bool counted = std::all_of(state.step_counts().begin(), state.step_counts().end(),
                                   [](int64_t count) { return count >= 0 && count <= kMaxUpdates; });
  if (state.step() < 0 || state.step() > kMaxUpdates || state.version() == 0 || state.version() > kMaxUpdates ||
      state.step_counts_size() != static_cast<int>(plan_->params.size()) || !counted) {
    Close(absl::StrCat("state from node ", restore_->from, ": it does not fit the plan (got step ", state.step(),
                       ", version ", state.version(), ", ", state.step_counts_size(), " counts, want ",
                       plan_->params.size(), " counts of 0 to ", kMaxUpdates, ")"));
    return;
  }
  restore_->state = state;
  MaybeFinishRestore();
}

void JobCore::MaybeFinishRestore() {
  if (!restore_->all_slabs || !restore_->state.has_value() || !nodes_->fetching()) {
    return;
  }
  auto cast = Join(optimizer_devices_.count(), [this, restore = restore_](const absl::Status& status) {
    if (closed_ || restore_ != restore || !nodes_->fetching()) {
      return;
    }
    if (!status.ok()) {
      Close(absl::StrCat("state from node ", restore->from, ": ", status.message()));
      return;
    }
    const v1::PeerMessage::State& state = *restore->state;
    committed_step_ = state.step();
    version_ = state.version();
    had_parameters_ = false;
    step_counts_.assign(state.step_counts().begin(), state.step_counts().end());
    trainer_states_ = std::move(restore->trainer_states);
    initial_writes_.clear();
    if (absl::Status written = journal_->WriteHeader({epoch_, committed_step_, version_}); !written.ok()) {
      LogError(absl::StrCat("job ", name(), ": ", written.message()));
    }
    Event(-1, "state",
          absl::StrCat("step ", committed_step_, " came from node ", restore->from, ", in ",
                       absl::FormatDuration(absl::Trunc(MonotonicNow() - restore->began, absl::Milliseconds(1)))));
    node_events_->SetState(nullptr);
    restore_ = nullptr;
    nodes_->Restored();
  });
  DeviceOps ops(world_size());
  for (int rank = 0; rank < world_size(); ++rank) {
    ops[rank] = CommitOps(*plan_, memory_->pointers(), rank);
  }
  optimizer_devices_.Submit(absl::StrCat("cast step ", restore_->state->step()),
                            optimizer_devices_.Divide(std::move(ops)), cast);
}

}  // namespace shardd
