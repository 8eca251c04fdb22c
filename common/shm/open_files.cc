#include "common/shm/open_files.h"

#include <dirent.h>
#include <sys/eventfd.h>
#include <sys/resource.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/shm/unique_fd.h"

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

}  // namespace shardd
