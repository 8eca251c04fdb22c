#ifndef SHARDD_TESTS_SERVER_JOB_TRAINER_PROCESS_H_
#define SHARDD_TESTS_SERVER_JOB_TRAINER_PROCESS_H_

#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "common/shm/unique_fd.h"

namespace shardd {

inline UniqueFd DescriptorOf(pid_t pid) { return UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))); }

// Stands for the process of a trainer: it does nothing until it is killed, by the job or with this.
class TrainerProcess {
 public:
  TrainerProcess() : pid_(fork()) {
    while (pid_ == 0) pause();
  }
  ~TrainerProcess() { End(); }
  TrainerProcess(const TrainerProcess&) = delete;
  TrainerProcess& operator=(const TrainerProcess&) = delete;
  pid_t pid() const { return pid_; }
  UniqueFd Descriptor() const { return DescriptorOf(pid_); }
  void End() {
    if (ended_) return;
    kill(pid_, SIGKILL);
    (void)WasKilled();
  }
  // Whether it lives, at this moment.
  bool Lives() { return !ended_ && !Reaped(WNOHANG); }
  // Until it has ended; true where it was killed.
  bool WasKilled() { return (ended_ || Reaped(0)) && WIFSIGNALED(status_) && WTERMSIG(status_) == SIGKILL; }

 private:
  bool Reaped(int flags) { return ended_ = waitpid(pid_, &status_, flags) == pid_; }
  const pid_t pid_;
  int status_ = 0;
  bool ended_ = false;
};

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_JOB_TRAINER_PROCESS_H_
