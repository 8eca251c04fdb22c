#ifndef SHARDD_SERVER_JOB_MEMBERSHIP_ABSENT_RANKS_H_
#define SHARDD_SERVER_JOB_MEMBERSHIP_ABSENT_RANKS_H_

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/clock/monotonic_now.h"
#include "common/shm/unique_fd.h"

namespace shardd {

class JobEvents;
class Leavers;
class Sessions;

// Another answer to the same description is not to be had.
bool IsFinalRefusal(const absl::Status& status);

// What a job knows of ranks without a session: those whose description of the job it has refused, for whom others wait
// in vain, and processes that had a session in an epoch that has ended. Owns both. Loop-confined.
class AbsentRanks {
 public:
  struct Facts {
    const Sessions* sessions = nullptr;
    const Leavers* leavers = nullptr;
  };
  // All outlive it. `job`: its name, for errors.
  AbsentRanks(std::string job, Facts facts, JobEvents* events) : job_(std::move(job)), see_(facts), events_(events) {}

  // Ranks of one attempt come within this time. Nobody waits in vain for who was refused longer ago: a rank that is
  // mended and started again meanwhile comes to those that went on living.
  static constexpr absl::Duration kOneAttempt = absl::Seconds(30);

  // OpenJob or AttachRank of `rank` (-1: it did not say) came to `status` at `ticks` (TicksSinceBoot). Counts where no
  // retry would help and somebody may wait for the rank.
  void Answered(int rank, const absl::Status& status, uint64_t ticks, absl::Time now);
  // Whether a rank whose process was started at `start_ticks` (0: not known) waits in vain for refused ones. A process
  // that was started later belongs to another attempt, whose ranks describe the job anew. `now` as MonotonicNow.
  bool WaitsInVain(uint64_t start_ticks, absl::Time now) const;
  // ... and whether some rank does that has a session.
  bool SomeWaitInVain(absl::Time now) const;
  absl::Status RefusedError() const;
  std::vector<int> refused() const;
  // Which ranks were refused, and why; empty: none. `rank` -1: any.
  std::string WhyRefused(int rank = -1) const;

  // The epoch of a rank's session ended, and its process lives. Nothing is watched where `process` (a pidfd) is
  // invalid.
  void SessionEnded(int rank, pid_t pid, UniqueFd process);
  // Tells operators which of these processes have ended since; each once.
  void TellEnded();

  // Some rank has no session, and has not finished.
  bool Some() const;
  // ... and nobody knows that it attaches again by itself, because the process lives that had a session of an earlier
  // epoch.
  bool SomeStayAway() const;
  // It has a session now.
  void Came(int rank);

 private:
  struct Refusal {
    std::string why;
    uint64_t ticks;
    absl::Time time;
  };
  struct Process {
    pid_t pid;
    UniqueFd fd;
  };
  const std::string job_;
  const Facts see_;
  JobEvents* const events_;
  std::map<int, Refusal> refusals_;
  std::map<int, Process> processes_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_MEMBERSHIP_ABSENT_RANKS_H_
