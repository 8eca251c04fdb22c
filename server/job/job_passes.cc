// Jobs whose trainers write (writes/trainer_writes.h): what ranks wrote before a pass becomes the next version where
// the pass begins. A rank that dies in between leaves torn shards: the job goes back to the snapshot when the others
// can store no more (writes/snapshot_keeper.h).
//
// With pass_copies (JobConfig.pass_copies) the daemon makes copies where a pass begins, when the devices of all ranks
// have done with what they have stored, and with what they have read of the copies before. Nobody waits to hand in
// then: shards are stored into at any time outside of EnterPass, and of full parameters, which are the shards
// themselves.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/job_core.h"

namespace shardd {
namespace {

// How soon a rank that pauses is noticed by one that waits to hand in.
constexpr absl::Duration kPausePoll = absl::Microseconds(500);

}  // namespace

absl::Status JobCore::OnEnterPass(Session* session, RankCommand command) {
  const int rank = session->rank();
  const bool stepped = (command.flags & kStepped) != 0;
  SHARDD_RETURN_IF_ERROR(writes_.EnterPass(rank, stepped, command.done, &command.trainer_state));
  if (!stepped) {
    return absl::OkStatus();
  }
  steps_.AskInTrainer(rank, std::move(command.trainer_state));
  return CloseStep(session);
}

void JobCore::BeginPass() {
  counters_.set_passes(counters_.passes() + 1);
  writes_.LetInAll();
}

void JobCore::CommitTrainerStates() {
  for (int rank = 0; rank < world_size(); ++rank) {
    if (std::string state = writes_.TakeTrainerState(rank); !state.empty()) {
      committed_.SetTrainerState(rank, std::move(state));
      if (!writes_.pass_copies()) snapshots_.Outdate();  // else it is taken by the number of passes
    }
  }
}

absl::Status JobCore::CommitHandIns() {
  SHARDD_RETURN_IF_ERROR(writes_.StepComesFirst().status());
  const bool stepped = writes_.passes().stepped(0);
  if (!stepped) {
    CommitTrainerStates();
    if (!writes_.hand_ins().any_since_version()) {
      BeginPass();
      return absl::OkStatus();
    }
  }
  SHARDD_RETURN_IF_ERROR(stepped ? unsharding_.CompareOrders() : absl::OkStatus());
  DeviceOps ops = stepped ? SettleAllPresence() : DeviceOps(world_size());  // before backwards count from 0 again
  decision_.BeginCommit();
  auto done = work_.Join(world_size(), [this, stepped](const absl::Status& status) {  // an abort waits for it
    decision_.End();
    if (!status.ok()) {
      Close(absl::StrCat("commit of a write window: ", status.message()));
      return;
    }
    if (!closed_) FinishPassCommit(stepped);
  });
  for (int rank = 0; rank < world_size(); ++rank) {
    DeviceWork work;
    work.label = absl::StrCat("cast version ", committed_.version() + 1);
    work.ops = std::move(ops[rank]);
    if (writes_.hand_ins().any_since_version()) {
      for (DeviceOp& op : CommitOps(*plan_, memory_->pointers(), rank)) {
        work.ops.push_back(std::move(op));
      }
    }
    work.done = done;
    devices_[rank]->Submit(StreamId::kOptimizer, std::move(work));
  }
  return absl::OkStatus();
}

// What ranks wrote before the pass is a version. Advance lets them in, unless somebody died meanwhile.
void JobCore::FinishPassCommit(bool stepped) {
  writes_.PassCommitted();
  if (stepped) {
    EndStep({});
  } else {
    committed_.CommitVersion();
    NoteHandInsCommitted();
    unsharding_.NewVersion();
  }
  if (writes_.pass_copies()) writes_.CopiesMade();
  AfterCommit();
}

void JobCore::NoteHandInsCommitted() {
  if (writes_.HandInsCommitted()) {
    snapshots_.Age();
    counters_.set_windows(counters_.windows() + 1);
  }
}

void JobCore::LetHandIn() {
  if (!writes_.hand_ins().any_since_version() && snapshots_.snapshot().IsDueBeforeWindow()) {
    snapshots_.Take();
    return;
  }
  writes_.LetHandIn();
}

void JobCore::PollPausesLater() {
  writes_.PollPauses(true);
  loop_->AddTimer(MonotonicNow() + kPausePoll, [weak = weak_from_this()] {
    if (const std::shared_ptr<JobCore> self = weak.lock(); self != nullptr) {
      self->writes_.PollPauses(false);
      self->Advance();
    }
  });
}

// With pass_copies ---------------------------------------------------------------------------------------------------

absl::Status JobCore::AnnouncePass() {
  SHARDD_RETURN_IF_ERROR(writes_.StepComesFirst().status());
  writes_.Announce();
  return absl::OkStatus();
}

absl::Status JobCore::BeginPassCopies() {
  SHARDD_RETURN_IF_ERROR(writes_.StepComesFirst().status());
  Held copies;
  copies.order = Held::Order::kDecisions;
  copies.what = "EnterPass";
  for (int rank = 0; rank < world_size(); ++rank) {
    copies.signals.push_back(given_back_.SignalOf(rank, writes_.passes().enter_signal(rank)));
  }
  if (!given_back_.HaveCome(copies.signals)) {
    writes_.AwaitPassDevices(true);
    copies.run = [this] {
      writes_.AwaitPassDevices(false);
      return absl::OkStatus();
    };
    return given_back_.When(std::move(copies));
  }
  return CopyForPass();
}

absl::Status JobCore::CopyForPass() {
  const bool stepped = writes_.passes().stepped(0);
  if (!stepped) {
    CommitTrainerStates();
  }
  SHARDD_RETURN_IF_ERROR(stepped ? unsharding_.CompareOrders() : absl::OkStatus());
  DeviceOps ops = stepped ? SettleAllPresence() : DeviceOps(world_size());  // before backwards count from 0 again
  const bool settles = std::any_of(ops.begin(), ops.end(), [](const auto& of_rank) { return !of_rank.empty(); });
  for (int rank = 0; rank < world_size(); ++rank) {
    for (DeviceOp& op : CommitOps(*plan_, memory_->pointers(), rank)) {
      ops[rank].push_back(std::move(op));
    }
  }
  decision_.BeginCommit();  // an abort waits for it
  auto done = work_.Join(optimizer_devices_.count(), [this, stepped](const absl::Status& status) {
    if (closed_) {
      return;
    }
    if (!status.ok()) {
      decision_.End();
      Close(absl::StrCat("copies for a pass: ", status.message()));
      return;
    }
    snapshots_.TakeThen(snapshots_.snapshot().IsDueWithPass(), [this, stepped] {
      decision_.End();
      snapshots_.Age();
      FinishPassCommit(stepped);
    });
  });
  ops = optimizer_devices_.Divide(std::move(ops), /*in_order=*/settles || plan_->shard_copies > 1);
  optimizer_devices_.Submit(absl::StrCat("copy version ", committed_.version() + 1), std::move(ops), done);
  return absl::OkStatus();
}

// Who has left full parameters, or asks, may store when no other rank's device reads them any more.
absl::Status JobCore::LetStore() {
  Held left;
  left.order = Held::Order::kDecisions;
  left.what = "LeaveFullParams";
  for (int rank = 0; rank < world_size(); ++rank) {
    left.signals.push_back(given_back_.SignalOf(rank, summons_.full_params().leave_signal(rank)));
  }
  if (!given_back_.HaveCome(left.signals)) {
    writes_.AwaitStoreDevices(true);
    left.run = [this] {
      writes_.AwaitStoreDevices(false);
      return absl::OkStatus();
    };
    return given_back_.When(std::move(left));
  }
  summons_.LeaveSignalsCame();
  writes_.LetStore();
  return absl::OkStatus();
}

}  // namespace shardd
