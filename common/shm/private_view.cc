#include "common/shm/private_view.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/shm/page_scan.h"
#include "common/shm/session_view.h"
#include "common/shm/slab_internal.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

using shm_internal::ErrnoStatus;
using shm_internal::kPageOfFile;
using shm_internal::kPagePresent;
using shm_internal::kPageSwapped;
using shm_internal::kPageWritten;
using shm_internal::ScanPages;

// <linux/userfaultfd.h> has these since kernel 6.7.
constexpr uint64_t kTrackFeatures = 1 << 12 | 1 << 13 | 1 << 15;  // WP_HUGETLBFS_SHMEM, WP_UNPOPULATED, WP_ASYNC
constexpr int kUserModeOnly = 1;

// Of an entry of /proc/self/pagemap.
constexpr uint64_t kEntryPresent = uint64_t{1} << 63;
constexpr uint64_t kEntrySwapped = uint64_t{1} << 62;
constexpr uint64_t kEntryOfFile = uint64_t{1} << 61;

void Append(PrivateView::Range range, std::vector<PrivateView::Range>* ranges) {
  if (!ranges->empty() && ranges->back().end == range.first) {
    ranges->back().end = range.end;
  } else {
    ranges->push_back(range);
  }
}

// Ascending, none over another.
std::vector<PrivateView::Range> Merged(std::vector<PrivateView::Range> ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<PrivateView::Range> merged;
  for (const PrivateView::Range& range : ranges) {
    if (!merged.empty() && range.first <= merged.back().end) {
      merged.back().end = std::max(merged.back().end, range.end);
    } else {
      merged.push_back(range);
    }
  }
  return merged;
}

absl::Status Try() {
  const int64_t size_bytes = 4 * kPageBytes;
  SHARDD_ASSIGN_OR_RETURN(const std::unique_ptr<Slab> slab, Slab::Create("try", SlabBacking::kSealedMemfd, size_bytes));
  UniqueFd fd(fcntl(slab->fd(), F_DUPFD_CLOEXEC, 0));
  SHARDD_ASSIGN_OR_RETURN(const MappedSlab mapped, MappedSlab::Map(std::move(fd), size_bytes, /*writable=*/true,
                                                                   /*keep_descriptor=*/true));
  SHARDD_ASSIGN_OR_RETURN(PrivateView view, PrivateView::Of(mapped, UniqueFd(fcntl(slab->fd(), F_DUPFD_CLOEXEC, 0))));
  volatile char* const own = mapped.At<char>(0);
  const auto found = [&view](std::vector<PrivateView::Range> want) -> absl::Status {
    SHARDD_ASSIGN_OR_RETURN(const std::vector<PrivateView::Range> got, view.Changed());
    const bool equal = std::equal(got.begin(), got.end(), want.begin(), want.end(),
                                  [](const auto& a, const auto& b) { return a.first == b.first && a.end == b.end; });
    return equal ? absl::OkStatus() : absl::InternalError("other pages are found than those that were stored into");
  };
  for (int time = 0; time < 2; ++time) {
    SHARDD_RETURN_IF_ERROR(found({}));
    own[kPageBytes] = 1;
    *slab->At<char>(2 * kPageBytes) = static_cast<char>(2 + time);
    if (own[2 * kPageBytes] != 2 + time || *slab->At<char>(kPageBytes) != 0) {
      return absl::InternalError("a private mapping does not show what others store");
    }
    SHARDD_RETURN_IF_ERROR(found({{kPageBytes, 2 * kPageBytes}}));
    SHARDD_RETURN_IF_ERROR(view.Drop({{kPageBytes, 2 * kPageBytes}}));
    if (own[kPageBytes] != 0) {
      return absl::InternalError("a page that was dropped does not show the slab");
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status PrivateView::Supported() {
  static const absl::Status* const tried = [] {
    const absl::Status status = Try();
    return new absl::Status(
        status.ok() ? status
                    : absl::UnimplementedError(absl::StrCat("find stores in the page table: ", status.message())));
  }();
  return *tried;
}

absl::StatusOr<PrivateView> PrivateView::Of(const MappedSlab& slab, UniqueFd fd) {
  PrivateView view;
  view.slab_ = std::move(fd);
  view.page_map_.reset(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  if (!view.page_map_.valid()) {
    return ErrnoStatus(errno, "open", "/proc/self/pagemap");
  }
  view.size_bytes_ = RoundUpToPage(slab.size_bytes());
  const auto size = static_cast<size_t>(view.size_bytes_);
  if (mmap(slab.data(), size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, view.slab_.get(), 0) != slab.data() ||
      madvise(slab.data(), size, MADV_DONTFORK) != 0) {
    return ErrnoStatus(errno, "map privately slab", "received");
  }
  view.begin_ = slab.At<char>(0);
  // Where parameters are cut over nodes, what others hold has no pages: reading one would allocate it, to the job's
  // end.
  struct stat object {};
  if (fstat(view.slab_.get(), &object) == 0 && int64_t{object.st_blocks} * 512 >= slab.size_bytes()) {
    SHARDD_RETURN_IF_ERROR(shm_internal::PopulatePages(view.begin_, view.size_bytes_, /*writable=*/false, "received"));
  }
  if (!view.Track().ok()) view.tracker_.reset();
  return view;
}

// Each page is marked as not written, which the kernel takes back by itself with a store.
absl::Status PrivateView::Track() {
  tracker_.reset(static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | kUserModeOnly)));
  uffdio_api api = {};
  api.api = UFFD_API;
  api.features = kTrackFeatures;
  uffdio_register registered = {};
  registered.range = {reinterpret_cast<uintptr_t>(begin_), static_cast<uint64_t>(size_bytes_)};
  registered.mode = UFFDIO_REGISTER_MODE_WP;
  uffdio_writeprotect mark = {};
  mark.range = registered.range;
  mark.mode = UFFDIO_WRITEPROTECT_MODE_WP;
  if (!tracker_.valid() || ioctl(tracker_.get(), UFFDIO_API, &api) != 0 ||
      ioctl(tracker_.get(), UFFDIO_REGISTER, &registered) != 0 ||
      ioctl(tracker_.get(), UFFDIO_WRITEPROTECT, &mark) != 0) {
    return ErrnoStatus(errno, "track stores of slab", "received");
  }
  untracked_ = {};
  return Tracked().status();
}

absl::StatusOr<std::vector<PrivateView::Range>> PrivateView::Tracked() const {
  std::vector<Range> written;
  SHARDD_RETURN_IF_ERROR(
      ScanPages(page_map_.get(), begin_, 0, size_bytes_, {.all_of = kPageWritten}, [&](int64_t first, int64_t end) {
        Append({first, end}, &written);
      }));
  return written;
}

absl::StatusOr<std::vector<PrivateView::Range>> PrivateView::Changed() const {
  std::vector<Range> looked_at = {{0, size_bytes_}};
  if (tracker_.valid()) {
    SHARDD_ASSIGN_OR_RETURN(looked_at, Tracked());
    looked_at.insert(looked_at.end(), untracked_.begin(), untracked_.end());
    looked_at = Merged(std::move(looked_at));
  }
  std::vector<Range> found;
  for (const Range& range : looked_at) {
    SHARDD_RETURN_IF_ERROR(FindPrivate(range, &found));
  }
  return found;
}

absl::Status PrivateView::FindPrivate(Range in, std::vector<Range>* found) const {
  const size_t before = found->size();
  const absl::Status status =
      ScanPages(page_map_.get(), begin_, in.first, in.end,
                {.none_of = kPageOfFile, .any_of = kPagePresent | kPageSwapped}, [&](int64_t first, int64_t end) {
                  Append({first, end}, found);
                });
  if (status.ok()) {
    return status;
  }
  found->resize(before);  // before kernel 6.7
  return FindPrivateByEntries(in, found);
}

absl::Status PrivateView::FindPrivateByEntries(Range in, std::vector<Range>* found) const {
  std::array<uint64_t, 4096> entries;
  const auto first_entry = reinterpret_cast<uintptr_t>(begin_) / static_cast<uintptr_t>(kPageBytes);
  for (int64_t page = in.first / kPageBytes; page < in.end / kPageBytes;) {
    const auto count = static_cast<size_t>(std::min(in.end / kPageBytes - page, static_cast<int64_t>(entries.size())));
    const auto bytes = static_cast<ssize_t>(count * sizeof(uint64_t));
    const auto at = static_cast<off_t>((first_entry + static_cast<uintptr_t>(page)) * sizeof(uint64_t));
    if (pread(page_map_.get(), entries.data(), static_cast<size_t>(bytes), at) != bytes) {
      return ErrnoStatus(errno, "read", "/proc/self/pagemap");
    }
    for (size_t i = 0; i < count; ++i, ++page) {
      if ((entries[i] & (kEntryPresent | kEntrySwapped)) != 0 && (entries[i] & kEntryOfFile) == 0) {
        Append({page * kPageBytes, (page + 1) * kPageBytes}, found);
      }
    }
  }
  return absl::OkStatus();
}

absl::Status PrivateView::Drop(const std::vector<Range>& ranges) {
  untracked_ = ranges;
  for (const Range& range : ranges) {
    char* const begin = begin_ + range.first;
    const int64_t size_bytes = range.end - range.first;
    if (madvise(begin, static_cast<size_t>(size_bytes), MADV_DONTNEED) != 0) {
      return ErrnoStatus(errno, "drop pages of slab", "received");
    }
    SHARDD_RETURN_IF_ERROR(shm_internal::PopulatePages(begin, size_bytes, /*writable=*/false, "received"));
    uffdio_writeprotect mark = {};
    mark.range = {reinterpret_cast<uintptr_t>(begin), static_cast<uint64_t>(size_bytes)};
    mark.mode = UFFDIO_WRITEPROTECT_MODE_WP;
    if (tracker_.valid() && ioctl(tracker_.get(), UFFDIO_WRITEPROTECT, &mark) != 0) {
      tracker_.reset();  // looks at every page from now on
    }
  }
  return absl::OkStatus();
}

absl::Status PrivateView::ReadShared(int64_t offset_bytes, char* out, int64_t size_bytes) const {
  for (int64_t done = 0; done < size_bytes;) {
    const ssize_t got = pread(slab_.get(), out + done, static_cast<size_t>(size_bytes - done), offset_bytes + done);
    if (got <= 0 && !(got < 0 && errno == EINTR)) {
      return ErrnoStatus(got == 0 ? EIO : errno, "read slab", "received");
    }
    done += std::max<ssize_t>(got, 0);
  }
  return absl::OkStatus();
}

absl::Status PrivateView::WriteShared(int64_t offset_bytes, int64_t size_bytes) const {
  for (int64_t done = 0; done < size_bytes;) {
    const int64_t at = offset_bytes + done;
    const ssize_t put = pwrite(slab_.get(), begin_ + at, static_cast<size_t>(size_bytes - done), at);
    if (put <= 0 && !(put < 0 && errno == EINTR)) {
      return ErrnoStatus(put == 0 ? EIO : errno, "write slab", "received");
    }
    done += std::max<ssize_t>(put, 0);
  }
  return absl::OkStatus();
}

}  // namespace shardd
