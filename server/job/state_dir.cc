#include "server/job/state_dir.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/observe/log.h"

namespace shardd {

absl::StatusOr<UniqueFd> PrepareStateDir(const std::string& path) {
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    return absl::FailedPreconditionError(absl::StrCat("state directory ", path, ": mkdir: ", std::strerror(errno),
                                                      "; create it or choose another with --state_dir"));
  }
  UniqueFd directory(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat info {};
  if (!directory.valid() || fstat(directory.get(), &info) != 0) {
    return absl::FailedPreconditionError(absl::StrCat("state directory ", path, ": ", std::strerror(errno)));
  }
  if (info.st_uid != geteuid() || (info.st_mode & 0022) != 0) {
    return absl::FailedPreconditionError(absl::StrCat("state directory ", path,
                                                      ": it must belong to this user and be writable for nobody else "
                                                      "(got uid ",
                                                      info.st_uid, ", mode ", info.st_mode & 0777, ")"));
  }
  UniqueFd lock(openat(directory.get(), ".lock", O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock.valid()) {
    return absl::FailedPreconditionError(absl::StrCat("state directory ", path, ": lock: ", std::strerror(errno)));
  }
  if (flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    return absl::AlreadyExistsError(
        absl::StrCat("state directory ", path, ": another daemon uses it; choose another with --state_dir"));
  }
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(path, error)) {
    if (absl::StartsWith(entry.path().filename().string(), "job-")) {
      LogWarning(absl::StrCat("removing ", entry.path().string(), ", left by a daemon that is gone"));
      std::filesystem::remove_all(entry.path(), error);
    }
  }
  return lock;
}

}  // namespace shardd
