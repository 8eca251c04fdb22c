#ifndef SHARDD_COMMON_SHM_PAGE_SCAN_H_
#define SHARDD_COMMON_SHM_PAGE_SCAN_H_

// Private to common/shm and its tests: what the kernel's page table says of this process's mappings (PAGEMAP_SCAN of
// /proc/self/pagemap, kernel 6.7).

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace shardd::shm_internal {

// Of a page.
inline constexpr uint64_t kPageWritten = 1 << 1;
inline constexpr uint64_t kPageOfFile = 1 << 2;
inline constexpr uint64_t kPagePresent = 1 << 3;
inline constexpr uint64_t kPageSwapped = 1 << 4;
inline constexpr uint64_t kPageHuge = 1 << 6;

struct WantedPages {
  uint64_t all_of = 0;
  uint64_t none_of = 0;
  uint64_t any_of = 0;  // 0: whatever else holds
};

// Calls `found` with the pages of [data + first, data + end) that are as wanted, as ranges of bytes from `data`,
// ascending; neighbours may come apart. In pieces: while the kernel looks, no other thread of the process can map
// memory. UNIMPLEMENTED: the kernel is older; other errors have the errno.
absl::Status ScanPages(int page_map, const void* data, int64_t first, int64_t end, WantedPages wanted,
                       absl::FunctionRef<void(int64_t first, int64_t end)> found);

}  // namespace shardd::shm_internal

#endif  // SHARDD_COMMON_SHM_PAGE_SCAN_H_
