#include "server/job/membership/gradient_writers.h"

#include <fcntl.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/clock/monotonic_now.h"
#include "server/job/membership/past_process.h"
#include "server/session/session.h"
#include "server/storage/job_memory.h"
#include "server/storage/job_slab.h"

namespace shardd {
namespace {

constexpr absl::Duration kDyingLimit = absl::Seconds(2);  // of a process that was killed and hangs in the kernel

}  // namespace

GradientWriters::GradientWriters(const JobMemory* memory) : memory_(*memory) {}

GradientWriters::~GradientWriters() = default;

std::string GradientWriters::TextOf(const std::list<Writer>& writers) {
  return absl::StrJoin(writers, ", ", [](std::string* out, const Writer& writer) {
    absl::StrAppend(out, "pid ", writer.pid, " of rank ", writer.rank);
  });
}

void GradientWriters::TakeUp(const PastProcess& former) {
  UniqueFd process(fcntl(former.process.get(), F_DUPFD_CLOEXEC, 0));
  writers_.push_back({former.rank, former.pid, former.uid, std::move(process)});
}

void GradientWriters::EpochEnded(const Session& session) {
  if (memory_.gradients() == nullptr || HasEnded(session.pidfd, session.peer.pid)) {
    return;
  }
  UniqueFd process(session.pidfd.valid() ? fcntl(session.pidfd.get(), F_DUPFD_CLOEXEC, 0) : -1);
  writers_.push_back({session.rank(), session.peer.pid, session.peer.uid, std::move(process)});
}

void GradientWriters::ForgetEnded() {
  const auto ended = [](const Writer& writer) { return HasEnded(writer.process, writer.pid); };
  writers_.remove_if(ended);
  left_to_.remove_if(ended);
}

std::unique_ptr<JobSlab> GradientWriters::TakeUnused() {
  ForgetEnded();
  return left_to_.empty() ? std::move(left_) : nullptr;
}

AttachAnswer GradientWriters::MayAttach(const std::string& what, int rank, int32_t pid, const UniqueFd& process,
                                        bool replace) {
  const bool on_host = memory_.gradients() == nullptr || memory_.gradients()->on_host();
  // Where processes cannot be told apart the host makes new shards with each epoch; a GPU has no room for that, so
  // there it is who it was.
  const auto asks = [&](const Writer& writer) {
    // On GPUs an attach speaks for the rank's own stream alone: the others' may still run what they were given.
    if (writer.rank != rank && memory_.place().memory != nullptr) return false;
    return CanBeTold(writer.process, writer.pid, process, pid) ? AreOneProcess(writer.process, writer.pid, process, pid)
                                                               : !on_host && !replace && writer.rank == rank;
  };
  writers_.remove_if(asks);
  left_to_.remove_if(asks);
  ForgetEnded();
  AttachAnswer answer;
  if (under_way_) {
    answer.status = absl::AbortedError(absl::StrCat(what, "new gradient shards are being made; attach again"));
    return answer;
  }
  if (anybody_) {
    answer.renew = "ranks of the daemon before may still write the gradient shards";
    return answer;
  }
  const auto writer =
      std::find_if(writers_.begin(), writers_.end(), [rank](const Writer& of) { return of.rank == rank; });
  if (writer == writers_.end()) {
    return answer;
  }
  if (replace && writer->killed == absl::InfiniteFuture()) {
    answer.not_killed = KillProcess(writer->process, writer->pid, writer->uid);
    if (answer.not_killed.ok()) {
      writer->killed = MonotonicNow();
    }
  }
  if (writer->killed != absl::InfiniteFuture() && MonotonicNow() - writer->killed < kDyingLimit) {
    answer.status = absl::AbortedError(
        absl::StrCat(what, "its last process (pid ", writer->pid, ") was killed and has not ended yet; attach again"));
    return answer;
  }
  answer.renew = absl::StrCat("its last process (pid ", writer->pid, ") lives and may still write the gradient shards");
  return answer;
}

absl::Status GradientWriters::CheckNoneLeft(const std::string& what, const std::string& why) const {
  return left_ == nullptr
             ? absl::OkStatus()
             : absl::ResourceExhaustedError(absl::StrCat(
                   what, why, ", and those of an epoch before are left to ", TextOf(left_to_),
                   " already (got 2, want at most 1 slab of gradients that is left to others); end these processes"));
}

absl::Status GradientWriters::TakeFailure(const std::string& what, const std::string& why) {
  const absl::Status failed = std::exchange(failed_, absl::OkStatus());
  return failed.ok()
             ? failed
             : absl::Status(failed.code(), absl::StrCat(what, why, ", and new ones cannot be made: ", failed.message(),
                                                        "; end that process"));
}

std::string GradientWriters::Begin() {
  under_way_ = true;
  return anybody_ ? "them" : TextOf(writers_);
}

void GradientWriters::Leave(std::unique_ptr<JobSlab> old) {
  under_way_ = anybody_ = false;
  left_ = std::move(old);
  left_to_ = std::exchange(writers_, {});
  if (left_->on_host()) {
    left_to_.clear();
  }
}

void GradientWriters::Fail(absl::Status why) {
  under_way_ = false;
  failed_ = std::move(why);
}

}  // namespace shardd
