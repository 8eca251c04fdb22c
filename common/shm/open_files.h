#ifndef SHARDD_COMMON_SHM_OPEN_FILES_H_
#define SHARDD_COMMON_SHM_OPEN_FILES_H_

#include <cstdint>

namespace shardd {

// Descriptors of this process, now. Other threads open and close theirs meanwhile, so whoever counts leaves some over.
struct OpenFiles {
  int64_t open = 0;
  int64_t limit = 0;  // RLIMIT_NOFILE; INT64_MAX: none
  int64_t left() const { return limit > open ? limit - open : 0; }
};
OpenFiles CountOpenFiles();

}  // namespace shardd

#endif  // SHARDD_COMMON_SHM_OPEN_FILES_H_
