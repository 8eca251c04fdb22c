#include "common/shm/open_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "common/shm/slab_internal.h"

namespace shardd {
namespace {

int64_t LimitOfOpenFiles() {
  rlimit limit{};
  const bool limited = getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  return limited ? static_cast<int64_t>(limit.rlim_cur) : INT64_MAX;
}

}  // namespace

OpenFiles CountOpenFiles() {
  OpenFiles files;
  files.limit = LimitOfOpenFiles();
  if (DIR* const folder = opendir("/proc/self/fd"); folder != nullptr) {
    while (const dirent* entry = readdir(folder)) files.open += entry->d_name[0] != '.' ? 1 : 0;
    --files.open;  // the directory itself
    closedir(folder);
  } else {
    files.open = files.limit;  // not even the directory could be opened
  }
  return files;
}

int64_t OpenFilesBeforeReserve() {
  const int64_t limit = LimitOfOpenFiles();
  return limit - std::min(kReservedFiles, limit / 8);
}

absl::Status CheckOpenFiles(absl::string_view operation) {
  const UniqueFd probe(eventfd(0, EFD_CLOEXEC));
  if (probe.valid() && probe.get() < OpenFilesBeforeReserve()) {
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(absl::StrCat(
      operation, ": the daemon has too many files open (its limit is ", LimitOfOpenFiles(), ", and the last ",
      LimitOfOpenFiles() - OpenFilesBeforeReserve(),
      " are kept for what runs); close jobs, or raise the limit (ulimit -n, or LimitNOFILE= of its unit)"));
}

absl::StatusOr<UniqueFd> Duplicate(absl::string_view what, int fd) {
  UniqueFd copy(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (copy.valid()) return copy;
  const int error = errno;
  const absl::Status status = shm_internal::ErrnoStatus(error, "duplicate descriptor of", what);
  if (error != EMFILE) return status;
  return absl::Status(status.code(), absl::StrCat(status.message(), "; raise the limit of open files (got ",
                                                  LimitOfOpenFiles(), "; ulimit -n, or LimitNOFILE= of its unit)"));
}

}  // namespace shardd
