#ifndef SHARDD_COMMON_SHM_SLAB_INTERNAL_H_
#define SHARDD_COMMON_SHM_SLAB_INTERNAL_H_

// Private to common/shm and its tests: mapping and populating, shared by both sides of a slab.

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace shardd::shm_internal {

inline constexpr int64_t kHugePageBytes = int64_t{2} << 20;

// `<operation> <object>: <what> (<errno text>)` with the code that fits the errno.
absl::Status ErrnoStatus(int error, absl::string_view operation, absl::string_view object);

// Maps `size_bytes` of `fd` shared from its start, at an address that huge pages can be used at. The errno is in the
// status: PERMISSION_DENIED for a seal or a read-only descriptor, RESOURCE_EXHAUSTED for want of memory.
absl::StatusOr<void*> MapShared(int fd, int64_t size_bytes, bool writable, absl::string_view object);

enum class PopulateWith {
  kKernel,  // MADV_POPULATE_{READ,WRITE}, kernel 5.14; falls back to kTouch by itself. An error is a status
  kTouch,   // one access per page; keeps contents, also of others who write them; the pages must be allocated, else
            // SIGBUS
};
// Makes every page of the mapping present, so that no later access faults for want of memory.
absl::Status PopulatePages(void* data, int64_t size_bytes, bool writable, absl::string_view object,
                           PopulateWith with = PopulateWith::kKernel);

// Bytes of the mapping that starts at `data` which the kernel maps with huge page table entries, from /proc/self/smaps;
// 0 where that cannot be told.
int64_t HugeMappedBytes(const void* data);

// What MakePiecePrivate does where it would be one mapping too many: of the slab that lies at `slab`, all pieces that
// are not private yet, as few mappings as there are gaps. Async-signal-safe. False: the kernel gives none.
bool MakeRestPrivate(int fd, uintptr_t slab, int64_t size_bytes, std::vector<char>& is_private);

}  // namespace shardd::shm_internal

#endif  // SHARDD_COMMON_SHM_SLAB_INTERNAL_H_
