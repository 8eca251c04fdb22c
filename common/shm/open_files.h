#ifndef SHARDD_COMMON_SHM_OPEN_FILES_H_
#define SHARDD_COMMON_SHM_OPEN_FILES_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace shardd {

// Descriptors of this process, now. Other threads open and close theirs meanwhile, so whoever counts leaves some over.
struct OpenFiles {
  int64_t open = 0;
  int64_t limit = 0;  // RLIMIT_NOFILE; INT64_MAX: none
  int64_t left() const { return limit > open ? limit - open : 0; }
};
OpenFiles CountOpenFiles();

// The last kReservedFiles descriptors that this process may have (fewer where its limit is small) are for what is under
// way: a daemon that takes nothing new while only they are left can still serve what it has. This many may be open
// before that.
inline constexpr int64_t kReservedFiles = 64;
int64_t OpenFilesBeforeReserve();
// RESOURCE_EXHAUSTED: no more are left than the reserve. Counts nothing: the kernel gives the lowest number that is
// free, so one of the last says that all others are taken. REQUIRES: nobody puts descriptors at high numbers, from
// OpenFilesBeforeReserve() on.
absl::Status CheckOpenFiles(absl::string_view operation);

}  // namespace shardd

#endif  // SHARDD_COMMON_SHM_OPEN_FILES_H_
