#ifndef SHARDD_SERVER_JOB_MEMBERSHIP_PAST_PROCESS_H_
#define SHARDD_SERVER_JOB_MEMBERSHIP_PAST_PROCESS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "common/shm/unique_fd.h"

namespace shardd {

// A trainer's process, also when its session has ended: by its pidfd, and where there is none by its pid, which is 0 in
// another PID namespace.

struct PastProcess {
  int rank = 0;
  int32_t pid = 0;
  uint32_t uid = 0;  // of its session
  UniqueFd process;
};

// Whether it is known that it has ended: never guessed, a process of which nothing is known may live.
bool HasEnded(const UniqueFd& process, int32_t pid);

// Whether AreOneProcess knows: before kernel 6.9 pidfds all look alike, and in another PID namespace pids do.
bool CanBeTold(const UniqueFd& process, int32_t pid, const UniqueFd& other, int32_t other_pid);

// Whether both are one process, as far as that can be known.
bool AreOneProcess(const UniqueFd& process, int32_t pid, const UniqueFd& other, int32_t other_pid);

// SIGKILL, to a process that was `uid`'s when its session began and is so still: a daemon with CAP_KILL does not lend
// it to whoever attaches and then runs a program that is set-user-ID. The process may live on for a while, or for ever
// where it hangs in the kernel: ask HasEnded. PERMISSION_DENIED: this daemon may not, or the process has other uids
// now; FAILED_PRECONDITION: there is no pidfd, or it is of a PID namespace that the
// daemon cannot signal. OK also where it has ended.
absl::Status KillProcess(const UniqueFd& process, int32_t pid, uint32_t uid);

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_MEMBERSHIP_PAST_PROCESS_H_
