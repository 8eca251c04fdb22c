#include "server/job/nodes/state_transfers.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/job/full_params/full_params.h"
#include "server/job/job_events.h"
#include "server/job/step/asked_steps.h"
#include "server/job/step/committed.h"
#include "server/job/work/job_work.h"
#include "server/job/work/optimizer_devices.h"
#include "server/job/writes/write_undo.h"
#include "server/loop/core_loop.h"
#include "server/optimizer/optimizer.h"
#include "server/storage/job_memory.h"

namespace shardd {

StateTransfers::StateTransfers(Facts facts, Services services, Results results)
    : see_(facts), use_(services), tell_(std::move(results)), senders_(use_.links, use_.worker) {}

StateSlabs StateTransfers::Slabs(bool next) const {
  if (two()) {
    const JobSlab* const kept = see_.memory->kept();
    const int64_t first = next ? see_.snapshot->next_offset_bytes() : see_.snapshot->offset_bytes();
    const MemoryPlan& memory = see_.plan->memory;
    return {{{v1::SLAB_SHARDS, kept, memory.shards_bytes, first},
             {v1::SLAB_OPTIMIZER, kept, memory.optimizer_bytes, first + memory.shards_bytes}}};
  }
  return {{{v1::SLAB_SHARDS, see_.memory->shards(), see_.plan->memory.shards_bytes},
           {v1::SLAB_OPTIMIZER, see_.memory->optimizer(), see_.plan->memory.optimizer_bytes}}};
}

StateSlabs StateTransfers::HeldSlabs(bool next) const {
  StateSlabs slabs = Slabs(next);
  const HeldSlab held[] = {HeldSlab::kShards, HeldSlab::kOptimizer};
  for (size_t i = 0; i < slabs.size(); ++i) {
    if (!HasHoles(*see_.plan, held[i])) continue;
    slabs[i].held = HeldRanges(*see_.plan, held[i], kSlabAlignmentBytes);
    slabs[i].bytes = 0;
    for (const ByteRange& range : slabs[i].held) slabs[i].bytes += range.end - range.first;
  }
  return slabs;
}

void StateTransfers::SendWaited() {
  for (const auto& [node, transfer] : senders_.TakeWaiting()) {
    NodeSendState(node, transfer);
  }
}

bool StateTransfers::HasUncommitted() const {
  // Of a step that is decided and made, old bytes are kept until it is shown.
  return see_.undo->undoing() || (see_.undo->any() && !see_.decision->applied()) || see_.decision->has_uncommitted() ||
         (see_.full_params->granted() && see_.full_params->AnyWrites());
}

// Also a step that is not shown yet: the node that asks may be the one that is to hold it.
void StateTransfers::NodeSendState(int node, uint64_t transfer) {
  senders_.Stop(node);
  const Committed& committed = *use_.committed;
  if (AwaitsUpdate() || AwaitsWord() || use_.member->search()->has_come()) {
    senders_.Await(node, transfer);
    return;
  }
  if (committed.version() == 0) {  // of rows: this node has lost its own, too
    v1::PeerMessage nothing;
    nothing.mutable_state()->set_transfer(transfer);
    use_.links->Send(node, std::move(nothing));
    return;
  }
  if (HasUncommitted()) {
    senders_.Await(node, transfer);
    if (!see_.undo->undoing()) {  // they cannot be a version without that node
      if (node == 0) use_.member->Node0AsksForState();
      use_.job->Fail(absl::AbortedError(absl::StrCat(
          "node ", node, " has lost its state and is sent this node's, without what ranks are writing; attach again")));
    }
    return;
  }
  const bool ahead = see_.decision->applied();
  v1::PeerMessage::State state;
  state.set_transfer(transfer);
  state.set_step(committed.step() + (ahead ? 1 : 0));
  state.set_version(committed.version() + (ahead ? 1 : 0));
  state.set_version_generation(ahead ? committed.next_generation() : committed.generation());
  for (size_t param = 0; param < committed.step_counts().size(); ++param) {
    state.add_step_counts(committed.step_counts()[param] + (see_.decision->Applies(param) ? 1 : 0));
  }
  const StateSlabs slabs = HeldSlabs(/*next=*/ahead);
  use_.events->Add(
      -1, "state",
      absl::StrCat("step ", state.step(), " is sent to node ", node, ", ", slabs[0].bytes + slabs[1].bytes, " bytes"));
  const auto failed = [this, weak = std::weak_ptr<void>(use_.work->Keep()), loop = use_.work->loop(),
                       node](const absl::Status& why) {
    loop->Post([this, weak, node, why] {
      if (const std::shared_ptr<void> job = weak.lock(); job != nullptr && !stopped_) {
        use_.job->Close(absl::StrCat("state for node ", node, ": ", why.message()));
      }
    });
  };
  const auto trainer_state = [&](int rank) -> const std::string& {
    return ahead ? see_.steps->step(rank).trainer_state() : committed.trainer_states()[static_cast<size_t>(rank)];
  };
  senders_.Send(node, state, see_.plan->world_size, trainer_state, slabs, failed, use_.work->Keep());
}

void StateTransfers::NodeBeginFetch(int from, uint64_t transfer) {
  if (stopped_) {
    return;
  }
  if (see_.decision->committing()) {  // a node is never so far behind
    use_.job->Close(absl::StrCat("the state of node ", use_.member->node(), ", which makes step ",
                                 use_.committed->step() + 1, ", does not belong to that of node ", from,
                                 ", which has another step; open the job anew on all nodes, from a checkpoint"));
    return;
  }
  use_.committed->Lose();  // from here on slabs are torn
  tell_.begins();
  fetch_ = std::make_shared<NodeFetch>(from, transfer, see_.plan->world_size);
  pieces_bytes_ = 0;
  const auto came = use_.work->AndAdvance([this](const absl::Status& status) {
    if (!status.ok()) {
      use_.job->Close(
          absl::StrCat("state of node ", use_.member->node(), " from node ", fetch_->from(), ": ", status.message()));
      return;
    }
    fetch_->SlabsAreThere();
    MaybeCame();
  });
  auto ended = [this, came, loop = use_.work->loop(), weak = std::weak_ptr<void>(use_.work->Keep()),
                of = std::weak_ptr<NodeFetch>(fetch_)](absl::Status status) {
    loop->Post([this, came, weak, of, status = std::move(status)] {
      const std::shared_ptr<void> job = weak.lock();
      if (job != nullptr && fetch_ != nullptr && fetch_ == of.lock()) came(status);
    });
  };
  auto take = [slabs = fetch_->Begin(HeldSlabs(/*next=*/true), std::move(ended)), from](
                  int node, const v1::PeerData& header, absl::string_view elements) {
    if (node == from) slabs->Take(header, elements);
  };
  use_.bytes->SetState(std::move(take));
  auto ask = [this, keep = use_.work->Keep(), fetch = fetch_, from, transfer] {
    if (fetch_ == fetch && use_.member->fetching()) {
      v1::PeerMessage message;
      message.mutable_fetch()->set_transfer(transfer);
      use_.links->Send(from, std::move(message));
    }
  };
  // Devices may still copy what ranks had stored to where the state comes.
  auto ask_behind_devices = [this, ask = std::move(ask)] {
    if (!two()) {
      ask();
      return;
    }
    use_.devices->Submit("await copies of before", DeviceOps(static_cast<size_t>(use_.devices->count())),
                         use_.work->Join(use_.devices->count(), [ask](const absl::Status&) { ask(); }));
  };
  // Behind what still writes initial values of an attempt that has ended.
  tell_.behind_writes([this, ask = std::move(ask_behind_devices)]() mutable {
    use_.worker->Post([this, ask = std::move(ask)]() mutable { use_.work->loop()->Post(std::move(ask)); });
  });
}

void StateTransfers::NodeTakeRankState(const v1::PeerMessage::RankState& state) {
  if (fetch_ != nullptr) fetch_->TakeRankState(state);
}

void StateTransfers::NodeTakeState(const v1::PeerMessage::State& state) {
  if (const absl::Status taken = fetch_->TakeState(*see_.plan, state); !taken.ok()) {
    use_.job->Close(absl::StrCat("node ", use_.member->node(), ", ", taken.message()));
    return;
  }
  MaybeCame();
}

void StateTransfers::MaybeCame() {
  if (!MayRestore()) return;
  const v1::PeerMessage::State& state = fetch_->state();
  use_.member->search()->Came(state.step(), state.version(), state.version_generation());
  use_.member->StateCame();
}

// All begin anew, and no piece that is still under way is written over what they begin with.
void StateTransfers::NodeEndFetch() {
  use_.bytes->SetState(nullptr);
  fetch_ = nullptr;
}

void StateTransfers::CheckPieces() {
  if (fetch_ == nullptr || !use_.member->fetching() || fetch_->complete()) return;
  const int64_t received = fetch_->received_bytes();
  if (std::exchange(pieces_bytes_, received) != received) use_.member->search()->Comes(MonotonicNow());
}

void StateTransfers::Restore() {
  const v1::PeerMessage::State& state = fetch_->Take();
  auto cast = use_.work->Join(use_.devices->count(), [this, fetch = fetch_, &state](const absl::Status& status) {
    if (fetch_ == fetch && use_.member->fetching()) Restored(status, state);
  });
  DeviceOps ops(static_cast<size_t>(see_.plan->world_size));
  const SlabPointers from = two() ? see_.snapshot->NextPointers() : see_.memory->pointers();
  for (int rank = 0; rank < see_.plan->world_size; ++rank) {
    ops[static_cast<size_t>(rank)] = CommitOps(*see_.plan, from, rank);
  }
  use_.devices->Submit(absl::StrCat("cast step ", state.step()), use_.devices->Divide(std::move(ops)), cast);
}

void StateTransfers::Restored(const absl::Status& status, const v1::PeerMessage::State& state) {
  if (!status.ok()) {
    use_.job->Close(
        absl::StrCat("state of node ", use_.member->node(), " from node ", fetch_->from(), ": ", status.message()));
    return;
  }
  if (two()) use_.committed->CommitsSnapshot(see_.snapshot->next_is_second());
  use_.committed->Restore(state.step(), state.version(), {state.step_counts().begin(), state.step_counts().end()},
                          fetch_->TakeTrainerStates(), use_.member->search()->came().generation);
  tell_.restored();
  use_.events->Add(
      -1, "state",
      absl::StrCat("step ", state.step(), " came from node ", fetch_->from(), ", in ",
                   absl::FormatDuration(absl::Trunc(MonotonicNow() - fetch_->began(), absl::Milliseconds(1)))));
  use_.bytes->SetState(nullptr);
  fetch_ = nullptr;
  use_.member->Restored();
}

void StateTransfers::Stop() {
  stopped_ = true;
  senders_.StopAll();
  fetch_ = nullptr;
}

}  // namespace shardd
