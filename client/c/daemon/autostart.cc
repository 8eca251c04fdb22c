#include "client/c/daemon/autostart.h"

#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "client/c/daemon/connect.h"
#include "client/c/host/process.h"
#include "common/clock/monotonic_now.h"
#include "common/cuda/no_kernels.h"
#include "common/process/daemon_address.h"
#include "common/process/environment.h"
#include "common/process/spawn.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

constexpr absl::Duration kLongestStart = absl::Minutes(5);  // where the caller has no limit of its own
constexpr absl::Duration kPollInterval = absl::Milliseconds(10);
constexpr size_t kMaxSocketPath = 107;
constexpr off_t kMaxLogBytes = 4 << 20;
constexpr off_t kLogTailBytes = 2000;

// Makes `path` (0700) or accepts it: a folder, no link, of this user, closed to others. Anything else could be somebody
// else's trap in a world-writable place.
absl::Status MakePrivateFolder(const std::string& path) {
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    return absl::PermissionDeniedError(absl::StrCat("start daemon: cannot make folder \"", path, "\" (",
                                                    strerror(errno), "); set SHARDD_ADDRESS to a running daemon"));
  }
  struct stat info {};
  if (lstat(path.c_str(), &info) != 0 || !S_ISDIR(info.st_mode)) {
    return absl::PermissionDeniedError(
        absl::StrCat("start daemon: \"", path, "\" is not a folder; remove it or set XDG_RUNTIME_DIR"));
  }
  if (info.st_uid != geteuid()) {
    return absl::PermissionDeniedError(absl::StrCat("start daemon: folder \"", path,
                                                    "\" belongs to another user (got uid ", info.st_uid, ", want ",
                                                    geteuid(), "); set XDG_RUNTIME_DIR"));
  }
  if ((info.st_mode & 077) != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat("start daemon: folder \"", path, "\" is open to other users (got mode ",
                     absl::StrFormat("%04o", info.st_mode & 07777), ", want 0700); chmod 700 it"));
  }
  return absl::OkStatus();
}

bool IsExecutableFile(const std::string& path) {
  struct stat info {};
  return stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode) && access(path.c_str(), X_OK) == 0;
}

// The daemon runs in "/", where a relative path means something else.
std::string Absolute(const std::string& path) {
  char folder[PATH_MAX];
  return path[0] == '/' || getcwd(folder, sizeof(folder)) == nullptr ? path : absl::StrCat(folder, "/", path);
}

// Exclusive among starters, until closed.
absl::StatusOr<UniqueFd> LockFolder(const std::string& folder, Deadline deadline, const Interrupt& interrupt) {
  const std::string path = absl::StrCat(folder, "/autostart.lock");
  UniqueFd fd(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd.valid()) {
    return absl::PermissionDeniedError(
        absl::StrCat("start daemon: cannot open \"", path, "\" (", strerror(errno), ")"));
  }
  while (flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) {
      return absl::InternalError(absl::StrCat("start daemon: cannot lock \"", path, "\" (", strerror(errno), ")"));
    }
    if (deadline.HasPassed()) {
      return absl::DeadlineExceededError(
          absl::StrCat("start daemon: another process has held \"", path, "\" all the time"));
    }
    SHARDD_RETURN_IF_ERROR(interrupt.Sleep(kPollInterval, "start daemon"));
  }
  return fd;
}

std::string LogTail(int log, off_t from) {
  const off_t end = lseek(log, 0, SEEK_END);
  from = std::max(from, end - kLogTailBytes);
  std::string text(static_cast<size_t>(std::max<off_t>(end - from, 0)), '\0');
  const ssize_t got = pread(log, text.data(), text.size(), from);
  text.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
  while (!text.empty() && text.back() == '\n') {
    text.pop_back();
  }
  return text;
}

// Whether a process has done anything since it was last asked: it has run, or its log has grown. To start with eight
// GPUs may take longer than any limit that notices a hang in time.
class Progress {
 public:
  Progress(pid_t pid, int log) : pid_(pid), log_(log) {}
  bool Made() {
    const std::pair<std::string, off_t> now = {RunTime(), lseek(log_, 0, SEEK_END)};
    return std::exchange(seen_, now) != now;
  }

 private:
  // utime and stime of all its threads, as text; empty: it has ended.
  std::string RunTime() const {
    char text[1024];
    const UniqueFd stat(open(absl::StrCat("/proc/", pid_, "/stat").c_str(), O_RDONLY | O_CLOEXEC));
    const ssize_t size = stat.valid() ? read(stat.get(), text, sizeof(text)) : 0;
    const std::string all(text, static_cast<size_t>(std::max<ssize_t>(size, 0)));
    const size_t name_end = all.rfind(')');  // the name may hold spaces
    if (name_end == std::string::npos) return "";
    const std::vector<std::string> fields = absl::StrSplit(all.substr(name_end + 1), ' ', absl::SkipEmpty());
    return fields.size() > 12 ? absl::StrCat(fields[11], " ", fields[12]) : "";
  }

  const pid_t pid_;
  const int log_;
  std::pair<std::string, off_t> seen_;
};

absl::Status StartDaemon(const AutostartOptions& options, const std::string& folder, const std::string& socket_path,
                         Deadline deadline) {
  SHARDD_ASSIGN_OR_RETURN(const std::string binary, FindDaemonBinary());
  const std::string log_path = absl::StrCat(folder, options.gpus ? "/shardd-cuda.log" : "/shardd.log");
  const std::string devices = options.gpus ? "cuda:all" : absl::StrCat("cpu:", options.devices);
  UniqueFd log(open(log_path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!log.valid()) {
    return absl::PermissionDeniedError(
        absl::StrCat("start daemon: cannot open \"", log_path, "\" (", strerror(errno), ")"));
  }
  off_t log_start = lseek(log.get(), 0, SEEK_END);
  if (log_start > kMaxLogBytes && ftruncate(log.get(), 0) == 0) {
    log_start = 0;
  }
  SHARDD_ASSIGN_OR_RETURN(const DetachedProcess process,
                          SpawnDetached({binary, "--embedded", absl::StrCat("--devices=", devices),
                                         absl::StrCat("--listen=unix:", socket_path)},
                                        log.get()));
  Progress progress(process.pid, log.get());
  absl::Time last_progress = MonotonicNow();
  while (true) {
    if (ConnectUnix(socket_path).ok()) {
      return absl::OkStatus();
    }
    pollfd exit_event = {process.pidfd.get(), POLLIN, 0};
    const int wait_ms = static_cast<int>(absl::ToInt64Milliseconds(kPollInterval));
    const bool ended = !process.pidfd.valid() || (poll(&exit_event, 1, wait_ms) > 0 && exit_event.revents != 0);
    if (ended) {
      const std::string tail = LogTail(log.get(), log_start);
      const std::string text = absl::StrCat("start daemon \"", binary, "\": it ended before it listened; its log \"",
                                            log_path, "\" ends with:\n", tail);
      return options.gpus && (absl::StrContains(tail, kNoCudaKernels) || absl::StrContains(tail, kNoGpuCode))
                 ? absl::UnimplementedError(text)
                 : absl::UnavailableError(text);
    }
    if (absl::Status interrupted = options.interrupt->Check("start daemon"); !interrupted.ok()) {
      TerminateDetached(process);
      return interrupted;
    }
    const absl::Time now = MonotonicNow();
    if (progress.Made()) {
      last_progress = now;
    }
    if (deadline.HasPassed() || now - last_progress >= options.stall_timeout) {
      TerminateDetached(process);
      return absl::UnavailableError(absl::StrCat("start daemon \"", binary, "\": it does not listen on \"", socket_path,
                                                 "\" (nothing done and nothing logged for ",
                                                 absl::FormatDuration(now - last_progress), "); its log \"", log_path,
                                                 "\" ends with:\n", LogTail(log.get(), log_start)));
    }
  }
}

}  // namespace

absl::StatusOr<std::string> UserFolder() {
  std::string path = RuntimeFolder();
  struct stat info {};
  if (path.empty() || path.size() + sizeof("/shardd-cuda-custody.sock") - 1 > kMaxSocketPath ||
      stat(path.substr(0, path.rfind('/')).c_str(), &info) != 0 || !S_ISDIR(info.st_mode) || info.st_uid != geteuid()) {
    path = TemporaryFolder();
  }
  SHARDD_RETURN_IF_ERROR(MakePrivateFolder(path));
  return path;
}

absl::StatusOr<std::string> FindDaemonBinary() {
  if (const std::string given = Environment("SHARDD_DAEMON"); !given.empty()) {
    if (!IsExecutableFile(given)) {
      return absl::NotFoundError(
          absl::StrCat("start daemon: SHARDD_DAEMON is no executable file (got \"", given, "\")"));
    }
    return Absolute(given);
  }
  std::vector<std::string> looked;
  if (const std::string library = LibraryDir(); !library.empty()) {
    looked.push_back(absl::StrCat(library, "/shardd"));
    looked.push_back(absl::StrCat(library, "/../bin/shardd"));
  }
  const std::string path = Environment("PATH");
  for (const absl::string_view folder : absl::StrSplit(path, ':', absl::SkipEmpty())) {
    looked.push_back(absl::StrCat(folder, "/shardd"));
  }
  for (const std::string& candidate : looked) {
    if (IsExecutableFile(candidate)) {
      return Absolute(candidate);
    }
  }
  return absl::NotFoundError(absl::StrCat("start daemon: no daemon runs and no binary was found (looked for ",
                                          absl::StrJoin(looked, ", "),
                                          "); set SHARDD_DAEMON to the binary or SHARDD_ADDRESS to a running daemon"));
}

absl::StatusOr<std::string> FindOrStartDaemon(const AutostartOptions& options) {
  const Deadline deadline = std::min(options.deadline, Deadline::In(kLongestStart));
  SHARDD_ASSIGN_OR_RETURN(const std::string folder, UserFolder());
  const std::string socket_path = absl::StrCat(folder, options.gpus ? "/shardd-cuda.sock" : "/shardd.sock");
  if (ConnectUnix(socket_path).ok()) {
    return socket_path;
  }
  SHARDD_ASSIGN_OR_RETURN(UniqueFd lock, LockFolder(folder, deadline, *options.interrupt));
  // Another starter may have been first.
  if (ConnectUnix(socket_path).ok()) {
    return socket_path;
  }
  const absl::Status started = StartDaemon(options, folder, socket_path, deadline);
  if (absl::IsUnimplemented(started)) {
    // What may lie on GPUs need not.
    (void)fputs(absl::StrCat("shardd: one with CPUs is started in its place: ", started.message(), "\n").c_str(),
                stderr);
    AutostartOptions on_cpus = options;
    on_cpus.gpus = false;
    lock.reset();
    return FindOrStartDaemon(on_cpus);
  }
  SHARDD_RETURN_IF_ERROR(started);
  return socket_path;
}

}  // namespace shardd
