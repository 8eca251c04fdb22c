// The copy of shards, and of state that trainers keep, to which a job goes back whose trainers write.
//
// With write windows it is taken before one opens, and the job goes back to it where an epoch ends while one is open.
// With pass_copies trainers may store at any time and no store is seen: it is taken with commits, while every rank is
// in a call, and every epoch that ends goes back to it.
//
// Ranks that live on go on storing until a call tells them that the epoch is over, and their GPUs with what they were
// given: those whose window is open, and with pass_copies all. So nothing is copied back before each of them has asked
// to attach again, which a client does behind all that its stream has and when no store of its process reaches the
// shards any more, or its process has ended.
//
// Where the plan has no room for it (kept_bytes 0), because passes read copies of all that trainers write, as it is
// stored, those are the copy: each commit makes them anew, and an epoch that ends meanwhile waits for the commit.

#include <fcntl.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/job/job_core.h"
#include "server/job/membership/past_process.h"
#include "server/observe/log.h"

namespace shardd {
namespace {

// A process that has several ranks may attach them one after the other: from then on the first one speaks for all.
constexpr absl::Duration kMostWaitForOwnRanks = absl::Seconds(5);

std::string NamesOf(const auto& writers) {
  return absl::StrJoin(writers, ", ", [](std::string* out, const auto& writer) {
    absl::StrAppend(out, "rank ", writer.rank, " (pid ", writer.pid, ")");
  });
}

}  // namespace

// Nobody writes: the shards are the committed version.
void JobCore::Keep() {
  keeping_ = true;
  kept_ = false;
  auto kept = [self = shared_from_this(), this, epoch = epoch_](const absl::Status& status) {
    if (epoch != epoch_ || closed_) {
      return;
    }
    keeping_ = false;
    if (!status.ok()) {
      Abort(absl::Status(status.code(), absl::StrCat("OpenWindow: keep a copy of the shards: ", status.message())), {});
      return;
    }
    NoteKept();
  };
  if (memory_->kept() != nullptr) {
    CopyKept(/*back=*/false, std::move(kept));
    return;
  }
  // Allocated when it is needed for the first time: most jobs never come here. Blocks, so elsewhere.
  memory_worker_->Post([self = shared_from_this(), this, kept = std::move(kept)] {
    auto made = std::make_shared<absl::StatusOr<std::unique_ptr<JobSlab>>>(JobMemory::MakeKept(*plan_));
    loop_->Post([self, this, made, kept] {
      if (made->ok() && !closed_) {
        memory_->SetKept(*std::move(*made));
        CopyKept(/*back=*/false, kept);
      } else {
        kept(made->status());
      }
    });
  });
}

void JobCore::NoteKept() {
  kept_ = true;
  kept_step_ = committed_step_;
  kept_states_ = trainer_states_;
  kept_age_ = 0;
}

void JobCore::KeepThen(bool due, std::function<void()> commit) {
  // The commit has made what passes read: nothing else of before is left where that is the copy.
  if (!pass_copies() || (!due && memory_->kept() != nullptr)) {
    commit();
    return;
  }
  if (memory_->kept() == nullptr) {
    kept_with_commit_ = true;
    commit();
    return;
  }
  kept_ = false;
  CopyKept(/*back=*/false, [this, commit = std::move(commit)](const absl::Status& status) {
    if (closed_) {
      return;
    }
    if (!status.ok()) {
      committing_ = false;
      Close(absl::StrCat("keep a copy of the shards: ", status.message()));
      return;
    }
    kept_with_commit_ = true;  // of what is about to be committed (AfterCommit)
    commit();
  });
}

// Each device copies what it works on.
void JobCore::CopyKept(bool back, std::function<void(absl::Status)> done) {
  DeviceOps ops(world_size());
  // The plan lays out what passes read as the shards where that is the copy.
  const JobSlab* const kept = memory_->kept() != nullptr ? memory_->kept() : memory_->parameters();
  for (int rank = 0; rank < world_size(); ++rank) {
    ops[rank] = KeepOps(*plan_, memory_->pointers(), kept->At(0), back, rank);
  }
  optimizer_devices_.Submit(absl::StrCat(back ? "go back to step " : "keep step ", back ? kept_step_ : committed_step_),
                            optimizer_devices_.Divide(std::move(ops)),
                            Join(optimizer_devices_.count(), std::move(done)));
}

// An epoch ended with a window open, or with pass_copies. Nobody attaches before it is done.
void JobCore::GoBackToKept() {
  restoring_ = true;
  committed_step_ = kept_step_;
  trainer_states_ = kept_states_;
  kept_age_ = 0;
  writers_.clear();
  writers_since_ = MonotonicNow();
  for (const auto& session : sessions_) {
    if (session != nullptr && (pass_copies() || ranks_[session->rank()].window) &&
        !HasEnded(session->pidfd, session->peer.pid)) {
      UniqueFd process(session->pidfd.valid() ? fcntl(session->pidfd.get(), F_DUPFD_CLOEXEC, 0) : -1);
      writers_.push_back({session->rank(), session->peer.pid, std::move(process)});
    }
  }
  waits_for_writers_ = true;
  const std::string others = NamesOf(writers_);
  Event(-1, "restore",
        absl::StrCat(pass_copies() ? "shards may have been stored into" : "a write window was open",
                     ": shards go back to the copy of step ", kept_step_,
                     others.empty() ? "" : absl::StrCat(", when the process of ", others, " can store no more")));
}

// The rank asks to attach: what its process had enqueued before has run.
absl::Status JobCore::CheckWriters(int rank, int32_t pid, bool replace) {
  if (!waits_for_writers_) {
    return absl::OkStatus();
  }
  // On GPUs an attach speaks for the rank's own stream alone: the others' may still run what they were given.
  const bool of_all = memory_->place().memory == nullptr && MonotonicNow() - writers_since_ >= kMostWaitForOwnRanks;
  std::string not_killed;
  for (auto it = writers_.begin(); it != writers_.end();) {
    // Who is replaced may be stopped, or not know yet: it must not store again.
    const bool kills = replace && it->rank == rank && it->process.valid() && (pid == 0 || it->pid != pid);
    if (const absl::Status killed = kills ? KillProcess(it->process, it->pid, uid()) : absl::OkStatus(); !killed.ok()) {
      not_killed = absl::StrCat(" (", killed.message(), ")");
    }
    // With replace it may be a process whose session was live until this very call, and that has not given it up yet.
    const bool gave_up = it->told || !replace;
    const bool is_back = !kills && ((it->rank == rank && ((it->pid == pid && gave_up) || !it->process.valid())) ||
                                    (of_all && it->told && pid != 0 && it->pid == pid));
    if (is_back || HasEnded(it->process, it->pid)) {
      it = writers_.erase(it);
      continue;
    }
    it->told = it->told || it->pid == pid;
    ++it;
  }
  Advance();
  if (!waits_for_writers_) {
    return absl::OkStatus();
  }
  const std::string others = NamesOf(writers_);
  return absl::AbortedError(absl::StrCat(
      "attach rank ", rank, " of job \"", name(), "\": its shards go back to the copy of step ", kept_step_,
      others.empty()
          ? "; attach again"
          : absl::StrCat(" when nobody can store into them any more, but the process of ", others,
                         " lives: it has to attach again or to end, or is killed where that rank is attached "
                         "with replace",
                         not_killed, "; attach again")));
}

void JobCore::CopyBack() {
  CopyKept(/*back=*/true, [this](const absl::Status& status) {
    if (!status.ok()) {
      Close(absl::StrCat("go back to step ", kept_step_, ": ", status.message()));
      return;
    }
    auto cast = Join(optimizer_devices_.count(), [this](const absl::Status& done) {
      restoring_ = false;
      if (!done.ok()) {
        Close(absl::StrCat("go back to step ", kept_step_, ": ", done.message()));
        return;
      }
      ++version_;
      if (absl::Status written = journal_->WriteHeader({epoch_, committed_step_, version_}); !written.ok()) {
        LogError(absl::StrCat("job ", name(), ": ", written.message()));
      }
    });
    DeviceOps ops(world_size());
    for (int rank = 0; rank < world_size() && !pass_copies(); ++rank) {  // else a pass makes its copies
      ops[rank] = CommitOps(*plan_, memory_->pointers(), rank);
    }
    optimizer_devices_.Submit(absl::StrCat("cast step ", kept_step_), optimizer_devices_.Divide(std::move(ops)), cast);
  });
}

// pass_copies, of a job that has taken another's place: its trainers will store with their first session.
bool JobCore::IsKeptForStores() {
  if (!pass_copies() || version_ == 0 || kept_ || committing_) {
    return true;
  }
  if (!std::exchange(keeping_, true)) {
    CopyKept(/*back=*/false, [this](const absl::Status& status) {
      keeping_ = false;
      if (!status.ok()) {
        Close(absl::StrCat("keep a copy of the shards: ", status.message()));
        return;
      }
      NoteKept();
    });
  }
  return false;
}

}  // namespace shardd
