#ifndef SHARDD_COMMON_SHM_SLAB_INTERNAL_H_
#define SHARDD_COMMON_SHM_SLAB_INTERNAL_H_

// Private to common/shm and its tests: mapping and populating, for both sides of a slab.

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/shm/slab.h"

namespace shardd::shm_internal {

inline constexpr int64_t kHugePageBytes = int64_t{2} << 20;

// `<operation> <object>: <what> (<errno text>)`, with the code that fits the errno.
absl::Status ErrnoStatus(int error, absl::string_view operation, absl::string_view object);

// Maps `size_bytes` of `fd` shared from its start, at an address where huge pages are possible, or are not. The status
// has the errno: PERMISSION_DENIED for a seal or a read-only descriptor, RESOURCE_EXHAUSTED for lack of memory.
absl::StatusOr<void*> MapShared(int fd, int64_t size_bytes, bool writable, absl::string_view object,
                                MappedPages pages = MappedPages::kAny);

enum class PopulateWith {
  kKernel,  // MADV_POPULATE_{READ,WRITE}, kernel 5.14; falls back to kTouch. An error is a status
  kTouch,   // one access per page; keeps the contents, also while others write them; pages must be allocated, else
            // SIGBUS
};
// Makes every page of the mapping present, so that no later access faults for lack of memory.
absl::Status PopulatePages(void* data, int64_t size_bytes, bool writable, absl::string_view object,
                           PopulateWith with = PopulateWith::kKernel);

// Makes all whole huge pages of a slab's mapping, which has no pages yet, huge ones, if the kernel can (6.1), also
// where it gives none with a fault (shmem_enabled "never", the default; not "deny"). Takes a tenth of the time of small
// ones, and gives up where it takes longer than they do (memory is fragmented). False: from some page on there are
// small ones, or none. REQUIRES: `data` is aligned to huge pages.
bool MakeHugePages(void* data, int64_t size_bytes);

// Bytes of the mapping of a slab at `data` that the kernel maps with huge page table entries; 0 if unknown. What other
// memory the process has mapped costs nothing (but before kernel 6.7, where huge pages of shared memory are offered).
int64_t HugeMappedBytes(const void* data, int64_t size_bytes);

}  // namespace shardd::shm_internal

#endif  // SHARDD_COMMON_SHM_SLAB_INTERNAL_H_
