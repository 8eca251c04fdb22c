// How the snapshot is taken and gone back to (writes/snapshot.h), and whom that waits for (writes/former_writers.h).

#include <fcntl.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/job/job_core.h"
#include "server/job/membership/past_process.h"
#include "server/observe/log.h"

namespace shardd {

// Nobody writes: the shards are the committed version.
void JobCore::Keep() {
  snapshot_.BeginTaking();
  auto taken = [self = shared_from_this(), this, epoch = committed_.epoch()](const absl::Status& status) {
    if (epoch != committed_.epoch() || closed_) {
      return;
    }
    if (!status.ok()) {
      snapshot_.GiveUpTaking();
      Abort(absl::Status(status.code(), absl::StrCat("OpenWindow: keep a copy of the shards: ", status.message())), {});
      return;
    }
    snapshot_.Taken(committed_.step(), committed_.trainer_states());
  };
  if (memory_->kept() != nullptr) {
    CopyKept(/*back=*/false, std::move(taken));
    return;
  }
  // Allocated when it is needed for the first time: most jobs never come here. Blocks, so elsewhere.
  memory_worker_->Post([self = shared_from_this(), this, taken = std::move(taken)] {
    auto made = std::make_shared<absl::StatusOr<std::unique_ptr<JobSlab>>>(JobMemory::MakeKept(*plan_));
    loop_->Post([self, this, made, taken] {
      if (made->ok() && !closed_) {
        memory_->SetKept(*std::move(*made));
        CopyKept(/*back=*/false, taken);
      } else {
        taken(made->status());
      }
    });
  });
}

void JobCore::KeepThen(bool due, std::function<void()> commit) {
  // The commit has made what passes read: nothing else of before is left where that is the copy.
  if (!writes_.pass_copies() || (!due && memory_->kept() != nullptr)) {
    commit();
    return;
  }
  if (memory_->kept() == nullptr) {
    snapshot_.TakenWithCommit();
    commit();
    return;
  }
  snapshot_.BeginTakingWithCommit();
  CopyKept(/*back=*/false, [this, commit = std::move(commit)](const absl::Status& status) {
    if (closed_) {
      return;
    }
    if (!status.ok()) {
      decision_.End();
      Close(absl::StrCat("keep a copy of the shards: ", status.message()));
      return;
    }
    snapshot_.TakenWithCommit();
    commit();
  });
}

void JobCore::CopyKept(bool back, std::function<void(absl::Status)> done) {
  snapshot_.Submit(back, back ? snapshot_.step() : committed_.step(),
                   work_.Join(optimizer_devices_.count(), std::move(done)));
}

// An epoch ended with a window open, or with pass_copies. Nobody attaches before it is done.
void JobCore::GoBackToKept() {
  snapshot_.GoBack();
  committed_.GoBack(snapshot_.step(), snapshot_.trainer_states());
  former_writers_.Begin(MonotonicNow());
  for (const auto& session : sessions_) {
    if (session != nullptr && (writes_.pass_copies() || writes_.hand_ins().open(session->rank())) &&
        !HasEnded(session->pidfd, session->peer.pid)) {
      UniqueFd process(session->pidfd.valid() ? fcntl(session->pidfd.get(), F_DUPFD_CLOEXEC, 0) : -1);
      former_writers_.Add(session->rank(), session->peer.pid, std::move(process));
    }
  }
  const std::string others = former_writers_.Names();
  events_.Add(-1, "restore",
              absl::StrCat(writes_.pass_copies() ? "shards may have been stored into" : "a write window was open",
                           ": shards go back to the copy of step ", snapshot_.step(),
                           others.empty() ? "" : absl::StrCat(", when the process of ", others, " can store no more")));
}

absl::Status JobCore::CheckWriters(int rank, int32_t pid, bool replace) {
  if (!former_writers_.waiting()) {
    return absl::OkStatus();
  }
  const std::string not_killed =
      former_writers_.Attaching(rank, pid, replace, memory_->place().memory != nullptr, MonotonicNow());
  Advance();
  if (!former_writers_.waiting()) {
    return absl::OkStatus();
  }
  const std::string others = former_writers_.Names();
  return absl::AbortedError(absl::StrCat(
      "attach rank ", rank, " of job \"", name(), "\": its shards go back to the copy of step ", snapshot_.step(),
      others.empty()
          ? "; attach again"
          : absl::StrCat(" when nobody can store into them any more, but the process of ", others,
                         " lives: it has to attach again or to end, or is killed where that rank is attached "
                         "with replace",
                         not_killed.empty() ? "" : absl::StrCat(" (", not_killed, ")"), "; attach again")));
}

void JobCore::CopyBack() {
  CopyKept(/*back=*/true, [this](const absl::Status& status) {
    if (!status.ok()) {
      Close(absl::StrCat("go back to step ", snapshot_.step(), ": ", status.message()));
      return;
    }
    auto cast = work_.Join(optimizer_devices_.count(), [this](const absl::Status& done) {
      snapshot_.EndGoBack();
      if (!done.ok()) {
        Close(absl::StrCat("go back to step ", snapshot_.step(), ": ", done.message()));
        return;
      }
      committed_.CommitVersion();
    });
    DeviceOps ops(world_size());
    for (int rank = 0; rank < world_size() && !writes_.pass_copies(); ++rank) {  // else a pass makes its copies
      ops[rank] = CommitOps(*plan_, memory_->pointers(), rank);
    }
    optimizer_devices_.Submit(absl::StrCat("cast step ", snapshot_.step()), optimizer_devices_.Divide(std::move(ops)),
                              cast);
  });
}

// pass_copies, of a job that has taken another's place: its trainers will store with their first session.
bool JobCore::IsKeptForStores() {
  if (!writes_.pass_copies() || committed_.version() == 0 || snapshot_.whole() || decision_.committing()) {
    return true;
  }
  if (!snapshot_.taking()) {
    snapshot_.BeginTaking();
    CopyKept(/*back=*/false, [this](const absl::Status& status) {
      if (!status.ok()) {
        snapshot_.GiveUpTaking();
        Close(absl::StrCat("keep a copy of the shards: ", status.message()));
        return;
      }
      snapshot_.Taken(committed_.step(), committed_.trainer_states());
    });
  }
  return false;
}

}  // namespace shardd
