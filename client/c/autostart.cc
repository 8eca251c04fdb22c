#include "client/c/autostart.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "client/c/connect.h"
#include "client/c/process.h"
#include "client/c/spawn.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

constexpr absl::Duration kStartTimeout = absl::Seconds(20);
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

bool IsTmpfs(const char* path) {
  struct statfs info {};
  return statfs(path, &info) == 0 && info.f_type == TMPFS_MAGIC;
}

// FNV-1a: names a folder, guards nothing.
uint32_t Hash(const std::string& text) {
  uint32_t hash = 2166136261u;
  for (const unsigned char c : text) {
    hash = (hash ^ c) * 16777619u;
  }
  return hash;
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
absl::StatusOr<UniqueFd> LockFolder(const std::string& folder, absl::Time deadline, const Interrupt& interrupt) {
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
    if (absl::Now() >= deadline) {
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

absl::Status StartDaemon(const AutostartOptions& options, const std::string& folder, const std::string& socket_path,
                         absl::Time deadline) {
  SHARDD_ASSIGN_OR_RETURN(const std::string binary, FindDaemonBinary());
  SHARDD_ASSIGN_OR_RETURN(const std::string state, StateFolder(folder, options.gpus));
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
  SHARDD_ASSIGN_OR_RETURN(
      const DetachedProcess process,
      SpawnDetached({binary, "--embedded", absl::StrCat("--devices=", devices),
                     absl::StrCat("--listen=unix:", socket_path), absl::StrCat("--state_dir=", state)},
                    log.get()));
  while (true) {
    if (ConnectUnix(socket_path).ok()) {
      return absl::OkStatus();
    }
    pollfd exit_event = {process.pidfd.get(), POLLIN, 0};
    const int wait_ms = static_cast<int>(absl::ToInt64Milliseconds(kPollInterval));
    const bool ended = !process.pidfd.valid() || (poll(&exit_event, 1, wait_ms) > 0 && exit_event.revents != 0);
    if (ended) {
      return absl::UnavailableError(absl::StrCat("start daemon \"", binary,
                                                 "\": it ended before it listened; its log \"", log_path,
                                                 "\" ends with:\n", LogTail(log.get(), log_start)));
    }
    if (absl::Status interrupted = options.interrupt->Check("start daemon"); !interrupted.ok()) {
      TerminateDetached(process);
      return interrupted;
    }
    if (absl::Now() >= deadline) {
      TerminateDetached(process);
      return absl::UnavailableError(absl::StrCat("start daemon \"", binary, "\": it does not listen on \"", socket_path,
                                                 "\"; its log \"", log_path, "\" ends with:\n",
                                                 LogTail(log.get(), log_start)));
    }
  }
}

}  // namespace

absl::StatusOr<std::string> UserFolder() {
  const char* runtime = getenv("XDG_RUNTIME_DIR");
  struct stat info {};
  if (runtime != nullptr && runtime[0] == '/' && stat(runtime, &info) == 0 && S_ISDIR(info.st_mode) &&
      info.st_uid == geteuid()) {
    const std::string path = absl::StrCat(runtime, "/shardd");
    if (path.size() + sizeof("/shardd-cuda.sock") - 1 <= kMaxSocketPath) {
      SHARDD_RETURN_IF_ERROR(MakePrivateFolder(path));
      return path;
    }
  }
  const std::string path = absl::StrCat("/tmp/shardd-", geteuid());
  SHARDD_RETURN_IF_ERROR(MakePrivateFolder(path));
  return path;
}

absl::StatusOr<std::string> StateFolder(const std::string& user_folder, bool gpus) {
  std::string path = absl::StrCat(user_folder, "/state");
  if (IsTmpfs("/dev/shm") && access("/dev/shm", W_OK | X_OK) == 0) {
    path = absl::StrFormat("/dev/shm/shardd-%d-%08x", geteuid(), Hash(user_folder));
  }
  if (gpus) {
    path += "-cuda";
  }
  SHARDD_RETURN_IF_ERROR(MakePrivateFolder(path));
  return path;
}

absl::StatusOr<std::string> FindDaemonBinary() {
  if (const char* given = getenv("SHARDD_DAEMON"); given != nullptr && given[0] != '\0') {
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
  if (const char* path = getenv("PATH"); path != nullptr) {
    for (const absl::string_view folder : absl::StrSplit(path, ':', absl::SkipEmpty())) {
      looked.push_back(absl::StrCat(folder, "/shardd"));
    }
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
  const absl::Time deadline = std::min(options.deadline, absl::Now() + kStartTimeout);
  SHARDD_ASSIGN_OR_RETURN(const std::string folder, UserFolder());
  const std::string socket_path = absl::StrCat(folder, options.gpus ? "/shardd-cuda.sock" : "/shardd.sock");
  if (ConnectUnix(socket_path).ok()) {
    return socket_path;
  }
  SHARDD_ASSIGN_OR_RETURN(const UniqueFd lock, LockFolder(folder, deadline, *options.interrupt));
  // Another starter may have been first.
  if (!ConnectUnix(socket_path).ok()) {
    SHARDD_RETURN_IF_ERROR(StartDaemon(options, folder, socket_path, deadline));
  }
  return socket_path;
}

}  // namespace shardd
