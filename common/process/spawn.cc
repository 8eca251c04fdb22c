#include "common/process/spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/close_range.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"

extern char** environ;

namespace shardd {
namespace {

// What the children report through the pipe: the pid, then an errno if exec failed. The pipe closes at exec.
struct Report {
  int32_t pid;
  int32_t error;
};

// Only async-signal-safe calls from here on: the process that was copied had threads, which may have held any lock.
[[noreturn]] void RunDetached(char* const* argv, const char* folder, int null_fd, int output, int report_fd) {
  setsid();
  const pid_t pid = _Fork();
  if (pid != 0) {
    if (pid < 0) {
      const Report report = {0, errno};
      (void)!write(report_fd, &report, sizeof(report));
    }
    _exit(0);
  }
  Report report = {getpid(), 0};
  (void)!write(report_fd, &report, sizeof(report));
  // The descriptors that are needed are moved out of the way of 0..3 first.
  const int null_copy = fcntl(null_fd, F_DUPFD, 10);
  const int output_copy = fcntl(output, F_DUPFD, 10);
  const int report_copy = fcntl(report_fd, F_DUPFD, 10);
  dup2(null_copy, 0);
  dup2(output_copy, 1);
  dup2(output_copy, 2);
  dup2(report_copy, 3);
  fcntl(3, F_SETFD, FD_CLOEXEC);
  if (syscall(SYS_close_range, 4U, ~0U, 0U) != 0) {
    for (int fd = 4; fd < 65536; ++fd) {  // a kernel before 5.9
      close(fd);
    }
  }
  struct sigaction action {};
  action.sa_handler = SIG_DFL;
  for (int signal = 1; signal < NSIG; ++signal) {
    (void)sigaction(signal, &action, nullptr);
  }
  sigset_t none;
  sigemptyset(&none);
  (void)sigprocmask(SIG_SETMASK, &none, nullptr);
  (void)!chdir(folder);
  execve(argv[0], argv, environ);
  report.error = errno;
  (void)!write(3, &report, sizeof(report));
  _exit(127);
}

bool ReadReport(int fd, Report* report) {
  size_t got = 0;
  while (got < sizeof(*report)) {
    const ssize_t n = read(fd, reinterpret_cast<char*>(report) + got, sizeof(*report) - got);
    if (n < 0 && errno == EINTR) {
      continue;
    }
    if (n <= 0) {
      return false;
    }
    got += static_cast<size_t>(n);
  }
  return true;
}

}  // namespace

absl::StatusOr<DetachedProcess> SpawnDetached(const std::vector<std::string>& argv, int output, const char* folder) {
  std::vector<char*> arguments;
  for (const std::string& argument : argv) {
    arguments.push_back(const_cast<char*>(argument.c_str()));
  }
  arguments.push_back(nullptr);
  int ends[2];
  UniqueFd null_fd(open("/dev/null", O_RDWR | O_CLOEXEC));
  if (!null_fd.valid() || pipe2(ends, O_CLOEXEC) != 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("start \"", argv[0], "\": no descriptors (", strerror(errno), ")"));
  }
  UniqueFd report_read(ends[0]);
  UniqueFd report_write(ends[1]);
  // All signals blocked across the copy, so that none of the trainer's handlers runs in the child.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const pid_t child = _Fork();
  if (child == 0) {
    RunDetached(arguments.data(), folder, null_fd.get(), output, report_write.get());
  }
  const int fork_error = errno;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (child < 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("start \"", argv[0], "\": cannot fork (", strerror(fork_error), ")"));
  }
  report_write.reset();
  // ECHILD where the trainer ignores SIGCHLD or reaps everything: nothing is left to do then.
  while (waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
  }
  Report report = {};
  if (!ReadReport(report_read.get(), &report)) {
    return absl::InternalError(absl::StrCat("start \"", argv[0], "\": the starting process was killed"));
  }
  Report failure = {};
  if (report.error == 0 && ReadReport(report_read.get(), &failure)) {
    report.error = failure.error;
  }
  if (report.error != 0) {
    return absl::NotFoundError(absl::StrCat("start \"", argv[0], "\": ", strerror(report.error)));
  }
  DetachedProcess process;
  process.pid = report.pid;
  process.pidfd.reset(static_cast<int>(syscall(SYS_pidfd_open, report.pid, 0)));
  return process;
}

void TerminateDetached(const DetachedProcess& process) {
  if (process.pidfd.valid()) {
    (void)syscall(SYS_pidfd_send_signal, process.pidfd.get(), SIGTERM, nullptr, 0);
  }
}

}  // namespace shardd
