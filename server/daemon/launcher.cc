#include "server/daemon/launcher.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <optional>

#include "common/process/process_stat.h"

namespace shardd {
namespace {

constexpr int kMostParents = 16;  // between a rank and its launcher: scripts of the user's

}  // namespace

JobLauncher JobLauncher::Find(const v1::Launcher& told, pid_t pid, uid_t uid) {
  JobLauncher result;
  for (int level = 0; level < kMostParents && pid > 0; ++level) {
    const std::optional<ProcessStat> process = ReadProcessStat(pid);
    if (!process.has_value() || process->parent <= 0) {
      break;
    }
    pid = process->parent;
    UniqueFd opened(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
    // Read behind the opening, so that the descriptor is of this very process.
    const std::optional<ProcessStat> parent = ReadProcessStat(pid);
    if (opened.valid() && parent.has_value() && parent->start_ticks == told.start_ticks()) {
      if (parent->uid == uid) {
        result.process_ = std::move(opened);
        result.alone_ = told.alone();
      }
      break;
    }
  }
  return result;
}

bool JobLauncher::lives() const {
  pollfd ended{process_.get(), POLLIN, 0};
  return process_.valid() && poll(&ended, 1, 0) == 0;
}

}  // namespace shardd
