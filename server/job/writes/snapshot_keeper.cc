#include "server/job/writes/snapshot_keeper.h"

#include <fcntl.h>

#include <algorithm>
#include <cassert>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/job/job_events.h"
#include "server/job/membership/past_process.h"
#include "server/job/membership/sessions.h"
#include "server/job/step/asked_steps.h"
#include "server/job/step/committed.h"
#include "server/job/step/step_decision.h"
#include "server/job/work/job_work.h"
#include "server/job/work/optimizer_devices.h"
#include "server/job/writes/trainer_writes.h"
#include "server/loop/core_loop.h"
#include "server/optimizer/optimizer.h"
#include "server/session/session.h"
#include "server/storage/job_memory.h"
#include "server/storage/job_slab.h"

namespace shardd {

void SnapshotKeeper::Take() {
  snapshot_.BeginTaking();
  auto taken = [this, epoch = use_.committed->epoch()](const absl::Status& status) {
    if (epoch != use_.committed->epoch()) {
      return;
    }
    if (!status.ok()) {
      snapshot_.GiveUpTaking();
      use_.job->Fail(absl::Status(status.code(), absl::StrCat("HandIn: take the snapshot: ", status.message())));
      return;
    }
    TookIt();
  };
  if (use_.memory->kept() != nullptr) {
    Copy(/*back=*/false, KeptPart::kAll, std::move(taken));
    return;
  }
  // Allocated when it is needed for the first time: most jobs never come here. Blocks, so elsewhere.
  use_.memory_worker->Post([this, job = use_.work->Keep(), epoch = use_.committed->epoch(), taken = std::move(taken)] {
    auto made = std::make_shared<absl::StatusOr<std::unique_ptr<JobSlab>>>(use_.memory->MakeKept(*see_.plan));
    use_.work->loop()->Post([this, job, epoch, made, taken] {
      if (!made->ok()) {
        taken(made->status());
        return;
      }
      if (epoch != use_.committed->epoch()) {
        use_.memory_worker->Post([made] {});  // the next epoch makes its own
        return;
      }
      use_.memory->SetKept(*std::move(*made));
      Copy(/*back=*/false, KeptPart::kAll, taken);
    });
  });
}

void SnapshotKeeper::TookIt() {
  snapshot_.Taken(use_.committed->step(), use_.committed->trainer_states());
  if (see_.writes->pass_copies()) use_.committed->SnapshotTaken(snapshot_.in_copies());
}

void SnapshotKeeper::TakeUp(std::vector<PastProcess> former, const Left& left) {
  snapshot_.TakeUp(left.second, left.shards_in_copies);
  if (left.has_next) HasNext();
  TookIt();
  snapshot_.GoBack();
  former_writers_.Begin(MonotonicNow());
  for (PastProcess& process : former) former_writers_.Add(process.rank, process.pid, std::move(process.process));
}

void SnapshotKeeper::TakeNext(DeviceOps before, std::function<void()> then) {
  auto taken = [this, epoch = use_.committed->epoch(), then = std::move(then)](const absl::Status& status) {
    if (epoch != use_.committed->epoch()) {
      return;  // it is written over before it is said
    }
    if (!status.ok()) {
      use_.job->Fail(absl::Status(status.code(), absl::StrCat("take the snapshot: ", status.message())));
      return;
    }
    HasNext();
    then();
  };
  if (std::any_of(before.begin(), before.end(), [](const auto& ops) { return !ops.empty(); })) {
    // Devices take both in their order.
    see_.devices->Submit(absl::StrCat("settle step ", use_.committed->step() + 1),
                         see_.devices->Divide(std::move(before), /*in_order=*/true),
                         use_.work->JoinGradientWork(see_.devices->count(), [this](const absl::Status& status) {
                           if (!status.ok()) use_.job->Fail(status);
                         }));
  }
  Copy(/*back=*/false, KeptPart::kAll, std::move(taken));
}

void SnapshotKeeper::HasNext() {
  snapshot_.HasNext();
  use_.committed->CommitsSnapshot(snapshot_.next_is_second());
}

void SnapshotKeeper::Restored() {
  snapshot_.TakeNext(use_.committed->step(), use_.committed->trainer_states());
  snapshot_.GoBack();
  if (!awaits_writers()) former_writers_.Begin(MonotonicNow());
}

// For another daemon, were this one to die.
void SnapshotKeeper::BeginSnapshot(bool stepped, uint64_t version) {
  if (!stepped) {
    use_.committed->BeginSnapshot({version, use_.committed->step(), {}}, use_.committed->trainer_states());
    return;
  }
  const bool decided = see_.decision->decided();  // else ranks have made it
  use_.committed->BeginSnapshot(
      {version, use_.committed->step() + 1, decided ? see_.decision->step().present : std::vector<bool>()},
      see_.steps->TrainerStates());
}

void SnapshotKeeper::BeginVersion(bool stepped) {
  if (!snapshot_.two() && see_.writes->pass_copies() && (use_.memory->kept() == nullptr || snapshot_.in_copies())) {
    BeginSnapshot(stepped, use_.committed->version() + 1);
  }
}

void SnapshotKeeper::TakeThen(bool due, bool stepped, std::function<void()> commit) {
  // The commit has made what passes read: nothing else of before is left where that is the snapshot.
  if (snapshot_.two() || !see_.writes->pass_copies() ||
      (!due && use_.memory->kept() != nullptr && !snapshot_.in_copies())) {
    commit();
    return;
  }
  if (use_.memory->kept() == nullptr) {
    snapshot_.TakenWithCommit();
    use_.committed->SnapshotTaken();
    commit();
    return;
  }
  if (!snapshot_.in_copies()) BeginSnapshot(stepped, use_.committed->version() + 1);  // else BeginVersion has
  snapshot_.ChooseInCopies(due, use_.committed->snapshot_may_be_in_copies());         // the commit has made the copies
  snapshot_.BeginTakingWithCommit();
  snapshot_.CopyBegins(MonotonicNow());
  const bool behind = MayTakeBehind();
  Copy(/*back=*/false,
       behind                  ? KeptPart::kWithPass
       : snapshot_.in_copies() ? KeptPart::kStates
                               : KeptPart::kAll,
       [this, epoch = use_.committed->epoch(), behind, commit = std::move(commit)](const absl::Status& status) {
         if (epoch != use_.committed->epoch()) {
           return;  // the job was closed: no epoch ends before a version that is being made
         }
         if (!status.ok()) {
           use_.job->Close(absl::StrCat("take the snapshot: ", status.message()));
           return;
         }
         snapshot_.CopyEnds(MonotonicNow());
         if (behind) {
           TakeBehind();
         } else {
           snapshot_.TakenWithCommit();
           // Before anybody hears of the version, and stores again.
           use_.committed->SnapshotTaken(snapshot_.in_copies());
         }
         commit();
       });
}

// Streams of GPUs store whatever their host waits for, and what the daemon's optimizer updates no rank asks for.
bool SnapshotKeeper::MayTakeBehind() const {
  return see_.writes->passes().all_ask_to_store() && !snapshot_.with_each() &&
         see_.plan->config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER && use_.memory->place().memory == nullptr;
}

void SnapshotKeeper::TakeBehind() {
  use_.committed->SnapshotIsBehind();
  snapshot_.BeginBehind();
  for (const auto& session : *see_.sessions) {
    if (session != nullptr) session->words().PublishSnapshotBegun();
  }
  const KeptPart part = snapshot_.in_copies() ? KeptPart::kStates : KeptPart::kBehindPass;
  Copy(/*back=*/false, part, [this](const absl::Status& status) {
    if (!status.ok()) {
      use_.job->Close(absl::StrCat("take the snapshot: ", status.message()));
      return;
    }
    snapshot_.TakenBehind(MonotonicNow());
    use_.committed->SnapshotTaken(snapshot_.in_copies());  // no version is begun meanwhile (advance.cc)
    for (const auto& session : *see_.sessions) {
      if (session != nullptr) session->words().PublishSnapshotWhole();
    }
  });
}

void SnapshotKeeper::StepCommitted() {
  if (see_.writes->hand_ins().any_since_version()) {
    Age();
  }
}

// The snapshot that was taken for the version is whole.
void SnapshotKeeper::VersionCommitted() {
  if (snapshot_.two()) {
    snapshot_.TakeNext(use_.committed->step(), use_.committed->trainer_states());
  } else if (snapshot_.CommitTaken()) {
    TookIt();
  } else if (snapshot_.CommitBehind()) {
    snapshot_.OfCommitted(use_.committed->step(), use_.committed->trainer_states());
  }
}

void SnapshotKeeper::Copy(bool back, KeptPart part, std::function<void(absl::Status)> done) {
  snapshot_.Submit(back, part, back ? snapshot_.step() : use_.committed->step(),
                   use_.work->Join(see_.devices->count(), std::move(done)));
}

void SnapshotKeeper::GoBackIfStored() {
  const TrainerWrites& writes = *see_.writes;
  if (!writes.hand_ins().any_since_version() &&
      (!writes.pass_copies() || !snapshot_.exists() || snapshot_.going_back())) {
    return;
  }
  snapshot_.GoBack();
  // Over nodes it is of the committed version, or of the one that this call makes it, and stays that.
  if (!snapshot_.two()) use_.committed->GoBack(snapshot_.step(), snapshot_.trainer_states());
  former_writers_.Begin(MonotonicNow());
  for (const auto& session : *see_.sessions) {
    if (session != nullptr && (writes.pass_copies() || writes.hand_ins().open(session->rank())) &&
        !HasEnded(session->pidfd, session->peer.pid)) {
      UniqueFd process(session->pidfd.valid() ? fcntl(session->pidfd.get(), F_DUPFD_CLOEXEC, 0) : -1);
      former_writers_.Add(session->rank(), session->peer.pid, std::move(process));
    }
  }
  const std::string others = former_writers_.Names();
  use_.events->Add(
      -1, "restore",
      absl::StrCat(writes.pass_copies() ? "shards may have been stored into" : "a rank was handing in",
                   ": shards go back to the snapshot of step ", snapshot_.step(),
                   others.empty() ? "" : absl::StrCat(", when the process of ", others, " can store no more")));
}

void SnapshotKeeper::CopyBack() {
  former_writers_.StopWaiting();
  ++copying_back_;
  Copy(/*back=*/true, snapshot_.in_copies() ? KeptPart::kStates : KeptPart::kAll, [this](const absl::Status& status) {
    if (!status.ok()) {
      use_.job->Close(absl::StrCat("go back to step ", snapshot_.step(), ": ", status.message()));
      return;
    }
    if (snapshot_.two()) {
      EndCopyBack();
      return;
    }
    auto cast = use_.work->Join(see_.devices->count(), [this](const absl::Status& done) {
      EndCopyBack();
      if (!done.ok()) {
        use_.job->Close(absl::StrCat("go back to step ", snapshot_.step(), ": ", done.message()));
        return;
      }
      use_.committed->CommitVersion();
    });
    DeviceOps ops(see_.plan->world_size);
    for (int rank = 0; rank < see_.plan->world_size && !see_.writes->pass_copies(); ++rank) {
      ops[rank] = CommitOps(*see_.plan, use_.memory->pointers(), rank);  // with pass_copies a pass makes its copies
    }
    see_.devices->Submit(absl::StrCat("cast step ", snapshot_.step()), see_.devices->Divide(std::move(ops)), cast);
  });
}

// Over nodes another may have been begun meanwhile, of a state that has come.
void SnapshotKeeper::EndCopyBack() {
  if (--copying_back_ == 0 && !awaits_writers()) snapshot_.EndGoBack();
}

std::string SnapshotKeeper::Attaching(int rank, int32_t pid, const UniqueFd& process, bool replace) {
  return former_writers_.Attaching(rank, pid, process, replace, use_.memory->place().memory != nullptr, MonotonicNow());
}

absl::Status SnapshotKeeper::CheckWriters(const std::string& what, const std::string& not_killed) const {
  if (!awaits_writers()) {
    return absl::OkStatus();
  }
  const std::string others = former_writers_.Names();
  return absl::AbortedError(absl::StrCat(
      what, "its shards go back to the snapshot of step ", snapshot_.step(),
      others.empty()
          ? "; attach again"
          : absl::StrCat(" when nobody can store into them any more, but the process of ", others,
                         " lives: it has to attach again or to end, or is killed where that rank is attached "
                         "with replace",
                         not_killed.empty() ? "" : absl::StrCat(" (", not_killed, ")"), "; attach again")));
}

absl::Status SnapshotKeeper::CheckMayBegin(const std::string& what) {
  if (snapshot_.going_back()) {
    return absl::AbortedError(
        absl::StrCat(what, "its shards go back to the snapshot of step ", snapshot_.step(), "; attach again"));
  }
  if (snapshot_.behind()) {
    return absl::AbortedError(absl::StrCat(what, "the snapshot of its shards is being taken; attach again"));
  }
  // With pass_copies, a job that has taken another's place: its trainers will store with their first session.
  if (!see_.writes->pass_copies() || use_.committed->version() == 0 || snapshot_.exists() ||
      see_.decision->committing()) {
    return absl::OkStatus();
  }
  if (!snapshot_.taking()) {
    assert(!snapshot_.two());  // it came with the version, and this would be written over
    snapshot_.BeginTaking();
    BeginSnapshot(/*stepped=*/false, use_.committed->version());
    snapshot_.ChooseInCopies(/*due=*/true, use_.committed->snapshot_may_be_in_copies());
    const auto taken =
        use_.work->Join((snapshot_.in_copies() ? 2 : 1) * see_.devices->count(), [this](const absl::Status& status) {
          if (!status.ok()) {
            snapshot_.GiveUpTaking();
            use_.job->Close(absl::StrCat("take the snapshot: ", status.message()));
            return;
          }
          TookIt();
        });
    if (snapshot_.in_copies()) {  // no pass has made these copies
      DeviceOps ops(see_.plan->world_size);
      for (int rank = 0; rank < see_.plan->world_size; ++rank) {
        ops[rank] = CommitOps(*see_.plan, use_.memory->pointers(), rank);
      }
      see_.devices->Submit(absl::StrCat("copy step ", use_.committed->step()), see_.devices->Divide(std::move(ops)),
                           taken);
    }
    snapshot_.Submit(/*back=*/false, snapshot_.in_copies() ? KeptPart::kStates : KeptPart::kAll, use_.committed->step(),
                     taken);
  }
  return absl::AbortedError(absl::StrCat(what, "the snapshot of its shards is being taken; attach again"));
}

}  // namespace shardd
