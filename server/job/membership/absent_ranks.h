#ifndef SHARDD_SERVER_JOB_MEMBERSHIP_ABSENT_RANKS_H_
#define SHARDD_SERVER_JOB_MEMBERSHIP_ABSENT_RANKS_H_

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/shm/unique_fd.h"

namespace shardd {

// Another answer to the same description is not to be had.
bool IsFinalRefusal(const absl::Status& status);

// What a job knows of ranks without a session: those whose description of the job it has refused, and processes that
// had a session in an epoch that has ended. Loop-confined.
class AbsentRanks {
 public:
  // Ranks of one attempt come within this time. Nobody waits in vain for who was refused longer ago: a rank that is
  // mended and started again meanwhile comes to those that went on living.
  static constexpr absl::Duration kOneAttempt = absl::Seconds(30);

  // False: that is known. `ticks`: when the system says that it happened (TicksSinceBoot).
  bool Refused(int rank, std::string why, uint64_t ticks, absl::Time now);
  // Whether a rank whose process was started at `start_ticks` (0: not known) waits in vain for refused ones. A process
  // that was started later belongs to another attempt, whose ranks describe the job anew. `now` as MonotonicNow.
  bool WaitsInVain(uint64_t start_ticks, absl::Time now) const;
  std::vector<int> refused() const;
  bool some_refused() const { return !refusals_.empty(); }
  // Which ranks were refused, and why; empty: none. `rank` -1: any.
  std::string WhyRefused(int rank = -1) const;

  // The epoch of a rank's session ended, and its process lives. Nothing is watched where `process` (a pidfd) is
  // invalid.
  void SessionEnded(int rank, pid_t pid, UniqueFd process);
  struct Ended {
    int rank;
    pid_t pid;
  };
  // Those of these processes that have ended since; each is told once.
  std::vector<Ended> TakeEnded();

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
  std::map<int, Refusal> refusals_;
  std::map<int, Process> processes_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_MEMBERSHIP_ABSENT_RANKS_H_
