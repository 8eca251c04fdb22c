#ifndef SHARDD_COMMON_SHM_OPEN_FILES_H_
#define SHARDD_COMMON_SHM_OPEN_FILES_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/shm/unique_fd.h"

namespace shardd {

// Descriptors of this process at this moment. Other threads open and close descriptors meanwhile, so leave a margin.
struct OpenFiles {
  int64_t open = 0;
  int64_t limit = 0;  // RLIMIT_NOFILE; INT64_MAX: none
  int64_t left() const { return limit > open ? limit - open : 0; }
};
OpenFiles CountOpenFiles();

// The last kReservedFiles descriptors of this process (fewer if its limit is small) are for work in progress, so that a
// daemon that accepts nothing new can still serve what it has. OpenFilesBeforeReserve() is the number that may be open
// before that.
inline constexpr int64_t kReservedFiles = 64;
int64_t OpenFilesBeforeReserve();
// RESOURCE_EXHAUSTED: only the reserve is left. Does not count: the kernel gives the lowest free number, so a number in
// the reserve shows that all others are taken. REQUIRES: nobody puts descriptors at high numbers, from
// OpenFilesBeforeReserve() on.
absl::Status CheckOpenFiles(absl::string_view operation);

// Another descriptor of the same, which is `what` in the text. RESOURCE_EXHAUSTED: this process, or the machine, has
// no more.
absl::StatusOr<UniqueFd> Duplicate(absl::string_view what, int fd);

}  // namespace shardd

#endif  // SHARDD_COMMON_SHM_OPEN_FILES_H_
