#include "server/job/membership/past_process.h"

#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <fstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace shardd {
namespace {

constexpr auto kPidfdMagic = 0x50494446;  // PID_FS_MAGIC, kernel 6.9: a pidfd's inode is its process's alone

bool InodeOf(const UniqueFd& process, struct stat* object) {
  struct statfs volume {};
  return process.valid() && fstatfs(process.get(), &volume) == 0 && volume.f_type == kPidfdMagic &&
         fstat(process.get(), object) == 0;
}

// Whether every uid of the process, real, effective, saved and of files, is `uid`. False as well where it cannot be
// known. The owner of /proc/PID tells nothing: of a process that may not be dumped it is root.
bool IsWholly(int32_t pid, uint32_t uid) {
  std::ifstream status(absl::StrCat("/proc/", pid, "/status"));
  for (std::string line; std::getline(status, line);) {
    if (!absl::StartsWith(line, "Uid:")) {
      continue;
    }
    int same = 0;
    for (const absl::string_view text :
         absl::StrSplit(absl::string_view(line).substr(4), absl::ByAnyChar("\t "), absl::SkipEmpty())) {
      uint32_t of_process = 0;
      same += absl::SimpleAtoi(text, &of_process) && of_process == uid ? 1 : 0;
    }
    return same == 4;
  }
  return false;
}

}  // namespace

bool HasEnded(const UniqueFd& process, int32_t pid) {
  if (process.valid()) {
    pollfd ended{process.get(), POLLIN, 0};
    return poll(&ended, 1, 0) == 1;
  }
  return pid > 0 && kill(pid, 0) != 0 && errno == ESRCH;
}

bool CanBeTold(const UniqueFd& process, int32_t pid, const UniqueFd& other, int32_t other_pid) {
  struct stat of {};
  return pid != 0 || other_pid != 0 || (InodeOf(process, &of) && InodeOf(other, &of));
}

bool AreOneProcess(const UniqueFd& process, int32_t pid, const UniqueFd& other, int32_t other_pid) {
  struct stat one {};
  struct stat two {};
  if (InodeOf(process, &one) && InodeOf(other, &two)) {
    return one.st_dev == two.st_dev && one.st_ino == two.st_ino;
  }
  return pid > 0 && pid == other_pid;
}

absl::Status KillProcess(const UniqueFd& process, int32_t pid, uint32_t uid) {
  const auto text = [pid](absl::string_view fact) { return absl::StrCat("kill process ", pid, ": ", fact); };
  if (!process.valid()) {
    return absl::FailedPreconditionError(text("its kernel gave no pidfd, and the pid may be another process's by now"));
  }
  if (pid > 0 && !IsWholly(pid, uid)) {
    if (HasEnded(process, pid)) {
      return absl::OkStatus();
    }
    // It may have become any program that its file lets run as another user, which is not the daemon's to end.
    return absl::PermissionDeniedError(
        text(absl::StrCat("it does not run as uid ", uid, " alone any more, or /proc does not show it")));
  }
  // The pid was this process's when it was looked at, unless the process has ended by now, and then nothing is
  // signalled.
  if (syscall(SYS_pidfd_send_signal, process.get(), SIGKILL, nullptr, 0) == 0 || errno == ESRCH) {
    return absl::OkStatus();
  }
  return errno == EPERM ? absl::PermissionDeniedError(
                              text("it is another user's (got EPERM); give the daemon CAP_KILL or the trainers' uid"))
                        : absl::FailedPreconditionError(
                              text(absl::StrCat(std::strerror(errno), "; it may be of another PID namespace")));
}

}  // namespace shardd
