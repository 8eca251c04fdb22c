// New gradient shards, where a process of an epoch that has ended may still write the old ones.
//
// Every trainer maps its job's gradient shards for writing, to clip and unscale them, and one that was stopped does so
// when it goes on, however many epochs later. So each session's process counts as a writer of the slab that it was
// given until it is known to have ended, or asks to attach again, which its library does when no store of its process
// reaches the job's memory any more. A rank whose last process is still one is not attached to the same slab: the
// process is killed where that was asked for and is allowed, and else there is a new slab, and whoever has a session
// begins anew with it. Of the old one the host's pages are given back: what is stored there takes memory of who stores.
// On GPUs it is what it was until all have ended that may write it, so there is one such slab at a time, and whoever
// would make another is refused, with the names of the processes that have to end.
//
// The same serves for sums that a GPU may still make (job_sums.cc) of a process whose end nothing tells.

#include <fcntl.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/job/job_core.h"
#include "server/observe/log.h"

namespace shardd {
namespace {

constexpr absl::Duration kDyingLimit = absl::Seconds(2);  // of a process that was killed and hangs in the kernel

}  // namespace

std::string JobCore::TextOf(const std::list<GradientWriter>& writers) {
  return absl::StrJoin(writers, ", ", [](std::string* out, const GradientWriter& writer) {
    absl::StrAppend(out, "pid ", writer.pid, " of rank ", writer.rank);
  });
}

// Of an epoch that ends.
void JobCore::NoteGradientWriter(const Session& session) {
  if (memory_->gradients() == nullptr || HasEnded(session.pidfd, session.peer.pid)) {
    return;
  }
  UniqueFd process(session.pidfd.valid() ? fcntl(session.pidfd.get(), F_DUPFD_CLOEXEC, 0) : -1);
  gradient_writers_.push_back({session.rank(), session.peer.pid, std::move(process)});
}

void JobCore::ForgetGradientWriters() {
  const auto ended = [](const GradientWriter& writer) { return HasEnded(writer.process, writer.pid); };
  gradient_writers_.remove_if(ended);
  if (left_gradients_ == nullptr) {
    return;
  }
  left_writers_.remove_if(ended);
  if (left_writers_.empty()) {
    // Behind what devices, and the copier, may still do with it.
    std::shared_ptr<JobSlab> slab = std::exchange(left_gradients_, nullptr);
    auto free = [self = shared_from_this(), slab](const absl::Status&) { self->memory_worker_->Post([slab] {}); };
    auto fence = [self = shared_from_this(), this, free] {
      if (closed_) return free(absl::OkStatus());
      optimizer_devices_.Submit("free gradient shards", optimizer_devices_.Divide(DeviceOps(world_size())),
                                Join(optimizer_devices_.count(), free));
    };
    copies_.Behind([loop = loop_, fence] { loop->Post(fence); });
  }
}

absl::Status JobCore::CheckGradientWriters(int rank, int32_t pid, const UniqueFd& process, bool replace) {
  const bool on_host = memory_->gradients() == nullptr || memory_->gradients()->on_host();
  // Before kernel 6.9 pidfds all look alike, and in another PID namespace pids do. With each epoch the host makes new
  // shards then; a GPU has no room for that, so there whoever cannot be told apart is who it was.
  const auto says_who = [](const UniqueFd& of) { return AreOneProcess(of, 0, of, 0); };
  const auto asks = [&](const GradientWriter& writer) {
    // On GPUs an attach speaks for the rank's own stream alone: the others' may still run what they were given.
    if (writer.rank != rank && memory_->place().memory != nullptr) return false;
    const bool can_be_told = pid != 0 || writer.pid != 0 || (says_who(process) && says_who(writer.process));
    return can_be_told ? AreOneProcess(writer.process, writer.pid, process, pid)
                       : !on_host && !replace && writer.rank == rank;
  };
  gradient_writers_.remove_if(asks);
  left_writers_.remove_if(asks);
  ForgetGradientWriters();
  const std::string what = absl::StrCat("attach rank ", rank, " of job \"", name(), "\": ");
  if (renewing_gradients_) {
    return absl::AbortedError(absl::StrCat(what, "new gradient shards are being made; attach again"));
  }
  const auto writer = std::find_if(gradient_writers_.begin(), gradient_writers_.end(),
                                   [&](const GradientWriter& of) { return of.rank == rank; });
  if (writer == gradient_writers_.end()) {
    return absl::OkStatus();
  }
  if (replace && writer->killed == absl::InfiniteFuture()) {
    if (const absl::Status killed = KillProcess(writer->process, writer->pid); killed.ok()) {
      writer->killed = MonotonicNow();
    } else {
      Event(rank, "replace", std::string(killed.message()));
    }
  }
  if (writer->killed != absl::InfiniteFuture() && MonotonicNow() - writer->killed < kDyingLimit) {
    return absl::AbortedError(
        absl::StrCat(what, "its last process (pid ", writer->pid, ") was killed and has not ended yet; attach again"));
  }
  return RenewGradients(
      what, absl::StrCat("its last process (pid ", writer->pid, ") lives and may still write the gradient shards"));
}

absl::Status JobCore::RenewGradients(const std::string& what, const std::string& why) {
  if (left_gradients_ != nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat(what, why, ", and those of an epoch before are left to ", TextOf(left_writers_),
                     " already (got 2, want at most 1 slab of gradients that is left to others); end these processes"));
  }
  if (attached() > 0) {
    Abort(absl::AbortedError(absl::StrCat(what, why, ": all ranks begin anew with new ones")), {});
  }
  if (closed_ || committing_ || promised() || gradient_work_ > 0 || undo_.undoing()) {
    return absl::AbortedError(absl::StrCat(what, why, ", and work on them is under way; attach again"));
  }
  if (!renew_failed_.ok()) {  // told once, to whoever asks next; then tried again
    const absl::Status failed = std::exchange(renew_failed_, absl::OkStatus());
    return absl::Status(failed.code(), absl::StrCat(what, why, ", and new ones cannot be made: ", failed.message(),
                                                    "; end that process"));
  }
  renewing_gradients_ = true;
  Event(-1, "renew",
        absl::StrCat(why, ": new ones are made, and the old ones are left to ", TextOf(gradient_writers_)));
  memory_worker_->Post([self = shared_from_this(), this] {
    auto made = std::make_shared<absl::StatusOr<std::unique_ptr<JobSlab>>>(memory_->MakeGradientsAgain(*plan_));
    loop_->Post([self, this, made] {
      renewing_gradients_ = false;
      if (closed_) {
        memory_worker_->Post([made] {});
        return;
      }
      if (!made->ok()) {
        renew_failed_ = made->status();
        return;
      }
      left_gradients_ = memory_->SetGradients(*std::move(*made));
      left_writers_ = std::exchange(gradient_writers_, {});
      if (left_gradients_->on_host()) {
        left_writers_.clear();
      }
      ForgetGradientWriters();
      // What GPUs still add goes into the old ones, too.
      memory_worker_->Post([gone = std::make_shared<std::vector<Straggler>>(std::exchange(stragglers_, {}))] {});
    });
  });
  return absl::AbortedError(absl::StrCat(what, why, ": new ones are being made; attach again"));
}

}  // namespace shardd
