#include "common/shm/page_scan.h"

#include <sys/ioctl.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "common/shm/slab_internal.h"

namespace shardd::shm_internal {
namespace {

// <linux/fs.h> has these since kernel 6.7.
struct PageRegion {
  uint64_t start = 0;
  uint64_t end = 0;
  uint64_t categories = 0;
};
struct ScanArgument {
  uint64_t size = sizeof(ScanArgument);
  uint64_t flags = 0;
  uint64_t start = 0;
  uint64_t end = 0;
  uint64_t walk_end = 0;
  uint64_t vec = 0;
  uint64_t vec_len = 0;
  uint64_t max_pages = 0;
  uint64_t category_inverted = 0;
  uint64_t category_mask = 0;
  uint64_t category_anyof_mask = 0;
  uint64_t return_mask = 0;
};
constexpr unsigned long kPageMapScan = _IOWR('f', 16, ScanArgument);
constexpr uintptr_t kPieceBytes = uintptr_t{64} << 20;  // 16 Ki entries: some 0.1 ms

}  // namespace

absl::Status ScanPages(int page_map, const void* data, int64_t first, int64_t end, WantedPages wanted,
                       absl::FunctionRef<void(int64_t first, int64_t end)> found) {
  std::array<PageRegion, 256> regions;
  const auto base = reinterpret_cast<uintptr_t>(data);
  const uintptr_t last = base + static_cast<uintptr_t>(end);
  ScanArgument argument;
  argument.start = base + static_cast<uintptr_t>(first);
  argument.vec = reinterpret_cast<uintptr_t>(regions.data());
  argument.vec_len = regions.size();
  argument.category_inverted = wanted.none_of;
  argument.category_mask = wanted.all_of | wanted.none_of;
  argument.category_anyof_mask = wanted.any_of;
  argument.return_mask = wanted.all_of | wanted.none_of | wanted.any_of;
  while (argument.start < last) {
    argument.end = std::min(last, static_cast<uintptr_t>(argument.start) + kPieceBytes);
    const int count = ioctl(page_map, kPageMapScan, &argument);
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count < 0) {
      return errno == ENOTTY ? absl::UnimplementedError("this kernel does not scan page tables (PAGEMAP_SCAN)")
                             : ErrnoStatus(errno, "scan the page table", "pagemap");
    }
    for (int i = 0; i < count; ++i) {
      const PageRegion& region = regions[static_cast<size_t>(i)];
      found(static_cast<int64_t>(region.start - base), static_cast<int64_t>(region.end - base));
    }
    argument.start = argument.walk_end;
  }
  return absl::OkStatus();
}

}  // namespace shardd::shm_internal
