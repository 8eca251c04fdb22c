#include "common/shm/open_files.h"

#include <dirent.h>
#include <sys/resource.h>

namespace shardd {

OpenFiles CountOpenFiles() {
  OpenFiles files;
  rlimit limit{};
  const bool limited = getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  files.limit = limited ? static_cast<int64_t>(limit.rlim_cur) : INT64_MAX;
  if (DIR* const folder = opendir("/proc/self/fd"); folder != nullptr) {
    while (const dirent* entry = readdir(folder)) files.open += entry->d_name[0] != '.' ? 1 : 0;
    --files.open;  // the folder itself
    closedir(folder);
  } else {
    files.open = files.limit;  // not even this one could be opened
  }
  return files;
}

}  // namespace shardd
