#ifndef SHARDD_SERVER_DAEMON_LAUNCHER_H_
#define SHARDD_SERVER_DAEMON_LAUNCHER_H_

#include <sys/types.h>

#include "common/shm/unique_fd.h"
#include "shardd/v1/trainer.pb.h"

namespace shardd {

// The process that starts a node's ranks again where they fail (torchrun). Thread-compatible.
class JobLauncher {
 public:
  JobLauncher() = default;
  // Looks among the parents of process `pid`, which belongs to `uid`. Reads /proc: not for the loop.
  static JobLauncher Find(const v1::Launcher& told, pid_t pid, uid_t uid);

  // It was found. All below are false where it was not.
  bool known() const { return process_.valid(); }
  bool lives() const;
  // Nobody but it can start a process that knows the job.
  bool alone() const { return known() && alone_; }

 private:
  UniqueFd process_;  // pidfd
  bool alone_ = false;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_DAEMON_LAUNCHER_H_
