#ifndef SHARDD_COMMON_SHM_PRIVATE_VIEW_H_
#define SHARDD_COMMON_SHM_PRIVATE_VIEW_H_

// A private (copy-on-write) view of a slab. Pages that this process has not stored into show the slab as it is now,
// also what others store later. A store makes a page of this process alone, without a signal, whoever makes it: any
// thread, or the kernel for a system call. The kernel's page table tells such pages from the slab's.

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/shm/slab.h"
#include "common/shm/unique_fd.h"

namespace shardd {

// Owns what finds the pages, and a descriptor of the slab; the mapping is the MappedSlab's. Thread-compatible. Stores
// of other threads are found by the next Changed, unless they are made during Drop of the same pages, which drops them.
class PrivateView {
 public:
  // Bytes from the start of the slab, in whole pages.
  struct Range {
    int64_t first = 0;
    int64_t end = 0;
  };

  // Returns OK if pages are found here. UNIMPLEMENTED: the page table cannot be read, or says something else (a kernel
  // before 4.3 or a container without /proc). Tried once for each process, with a few pages. Thread-safe.
  static absl::Status Supported();

  PrivateView() = default;
  // Makes the slab's mapping private, writable and present; DONTFORK stays. `fd` is the slab's, writable. REQUIRES: the
  // mapping outlives this, and no thread uses it meanwhile.
  static absl::StatusOr<PrivateView> Of(const MappedSlab& slab, UniqueFd fd);

  bool on() const { return begin_ != nullptr; }
  // The pages that this process has stored into since they were dropped, ascending. Costs a look at each page's entry
  // in the page table: some 3 ns where the kernel tracks stores by itself (6.7), else 100 to 250 ns.
  absl::StatusOr<std::vector<Range>> Changed() const;
  // Drops these pages: they show the slab again.
  absl::Status Drop(const std::vector<Range>& ranges);
  // Reads the slab's bytes, past what is private; writes the view's into it. Thread-safe.
  absl::Status ReadShared(int64_t offset_bytes, char* out, int64_t size_bytes) const;
  absl::Status WriteShared(int64_t offset_bytes, int64_t size_bytes) const;

 private:
  absl::Status Track();
  absl::StatusOr<std::vector<Range>> Tracked() const;
  absl::Status FindPrivate(Range in, std::vector<Range>* found) const;
  absl::Status FindPrivateByEntries(Range in, std::vector<Range>* found) const;

  char* begin_ = nullptr;
  int64_t size_bytes_ = 0;
  UniqueFd slab_;
  UniqueFd page_map_;
  UniqueFd tracker_;  // userfaultfd; invalid: every page is looked at
  // Dropped last, when a store may have come before they were tracked again: they are looked at in any case.
  std::vector<Range> untracked_;
};

}  // namespace shardd

#endif  // SHARDD_COMMON_SHM_PRIVATE_VIEW_H_
