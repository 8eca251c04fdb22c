#include "common/shm/slab.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/shm/session_view.h"
#include "common/shm/slab_internal.h"
#include "common/status/status_macros.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace shardd {
namespace {

using shm_internal::ErrnoStatus;
using shm_internal::HugeMappedBytes;
using shm_internal::kHugePageBytes;
using shm_internal::MakeHugePages;
using shm_internal::MapShared;
using shm_internal::PopulatePages;

absl::Status NoSpace(absl::string_view name, int64_t size_bytes) {
  return absl::ResourceExhaustedError(absl::StrCat("allocate slab \"", name, "\": out of memory (want ", size_bytes,
                                                   " bytes); give the daemon more memory or raise its cgroup limit"));
}

absl::StatusOr<UniqueFd> CreateMemfd(absl::string_view name) {
  const std::string label = absl::StrCat("shardd-", name.substr(0, 200));
  const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  UniqueFd fd(memfd_create(label.c_str(), flags | MFD_NOEXEC_SEAL));
  if (!fd.valid() && errno == EINVAL) {  // before kernel 6.3
    fd.reset(memfd_create(label.c_str(), flags));
  }
  if (!fd.valid()) {
    return ErrnoStatus(errno, "create memfd for slab", name);
  }
  // A memfd starts with mode 0777: anybody with a descriptor could reopen it for writing.
  if (fchmod(fd.get(), 0600) != 0) {
    return ErrnoStatus(errno, "restrict memfd of slab", name);
  }
  return fd;
}

absl::Status CheckFreeMemory(absl::string_view name, int64_t size_bytes) {
  const absl::StatusOr<MemoryLimits> limits = GetMemoryLimits();
  if (!limits.ok()) {
    return absl::OkStatus();  // the machine does not tell; the plan's own check has reported that
  }
  const absl::Status status = CheckMemory(*limits, size_bytes);
  return status.ok() ? status
                     : absl::Status(status.code(), absl::StrCat("allocate slab \"", name, "\": ", status.message()));
}

// Reserves every page of the range. ENOSPC is an error here; a touch of the mapping would be SIGBUS.
absl::Status Reserve(absl::string_view name, int fd, Slab::Range range) {
  const int64_t size_bytes = range.end - range.first;
  int result;
  do {
    result = fallocate(fd, 0, range.first, size_bytes);
  } while (result != 0 && errno == EINTR);
  if (result == 0) {
    return absl::OkStatus();
  }
  if (errno == ENOSPC || errno == ENOMEM || errno == EFBIG) {
    return NoSpace(name, size_bytes);
  }
  return ErrnoStatus(errno, "allocate slab", name);
}

// Asks for huge pages and tests with the first one whether the kernel gives them. A fault on the advised mapping must
// ask for them before anything else allocates: fallocate knows no advice and would fill in small pages.
bool ProbeHugePages(void* data, int64_t size_bytes) {
  if (size_bytes < kHugePageBytes || madvise(data, static_cast<size_t>(size_bytes), MADV_HUGEPAGE) != 0) {
    return false;
  }
  return PopulatePages(data, kHugePageBytes, /*writable=*/true, "").ok() &&
         HugeMappedBytes(data, kHugePageBytes) >= kHugePageBytes;
}

absl::Status Seal(absl::string_view name, SlabBacking backing, int fd) {
  int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if (backing == SlabBacking::kFrozenMemfd) {
    seals |= F_SEAL_FUTURE_WRITE;  // our own mapping exists and stays writable
  }
  return fcntl(fd, F_ADD_SEALS, seals) == 0 ? absl::OkStatus() : ErrnoStatus(errno, "seal slab", name);
}

constexpr int64_t kUnmapBytes = 4 * kHugePageBytes;  // some 0.7 ms

}  // namespace

absl::string_view SlabBackingName(SlabBacking backing) {
  switch (backing) {
    case SlabBacking::kSealedMemfd:
      return "sealed memfd";
    case SlabBacking::kFrozenMemfd:
      return "frozen memfd";
  }
  return "unknown";
}

absl::Status Slab::Open(absl::string_view name, SlabBacking backing, int64_t size_bytes, int64_t allocated_bytes) {
  if (size_bytes <= 0 || size_bytes > INT64_MAX - 2 * kHugePageBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("create slab \"", name, "\": size is out of range (got ", size_bytes, " bytes, want 1 or more)"));
  }
  name_ = std::string(name);
  backing_ = backing;
  if (allocated_bytes >= kHugePageBytes) {  // for smaller slabs, reading what is free is not worth its time
    SHARDD_RETURN_IF_ERROR(CheckFreeMemory(name, allocated_bytes));
  }
  SHARDD_ASSIGN_OR_RETURN(fd_, CreateMemfd(name));
  const int fd = fd_.get();
  const int64_t mapped_bytes = RoundUpToPage(size_bytes);
  if (ftruncate(fd, mapped_bytes) != 0) {
    return errno == EFBIG || errno == ENOSPC ? NoSpace(name, mapped_bytes) : ErrnoStatus(errno, "size slab", name);
  }
  SHARDD_ASSIGN_OR_RETURN(data_, MapShared(fd, mapped_bytes, /*writable=*/true, name));
  size_bytes_ = mapped_bytes;
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Slab>> Slab::Create(absl::string_view name, SlabBacking backing, int64_t size_bytes) {
  std::unique_ptr<Slab> slab(new Slab());
  SHARDD_RETURN_IF_ERROR(slab->Open(name, backing, size_bytes, size_bytes));
  const int fd = slab->fd_.get();
  const int64_t mapped_bytes = slab->size_bytes_;
  const bool given = ProbeHugePages(slab->data_, mapped_bytes);
  const bool made = !given && MakeHugePages(slab->data_, mapped_bytes);
  absl::Status populated = absl::OkStatus();
  if (given) {
    populated = PopulatePages(slab->data_, mapped_bytes, /*writable=*/true, name);
  }
  if (!given || !populated.ok()) {  // also explains better than the fault what is missing
    SHARDD_RETURN_IF_ERROR(Reserve(name, fd, {0, mapped_bytes}));
    SHARDD_RETURN_IF_ERROR(PopulatePages(slab->data_, mapped_bytes, /*writable=*/true, name));
  }
  // Parts of a large slab that a fault gave may still be in small pages; only the kernel's own account tells.
  slab->huge_pages_ =
      made || (given && HugeMappedBytes(slab->data_, mapped_bytes) >= mapped_bytes / kHugePageBytes * kHugePageBytes);
  SHARDD_RETURN_IF_ERROR(Seal(name, backing, fd));
  return slab;
}

absl::StatusOr<std::unique_ptr<Slab>> Slab::CreateLate(absl::string_view name, SlabBacking backing,
                                                       int64_t size_bytes) {
  std::unique_ptr<Slab> slab(new Slab());
  SHARDD_RETURN_IF_ERROR(slab->Open(name, backing, size_bytes, size_bytes));
  slab->huge_pages_ = ProbeHugePages(slab->data_, slab->size_bytes_) || MakeHugePages(slab->data_, slab->size_bytes_);
  SHARDD_RETURN_IF_ERROR(Seal(name, backing, slab->fd_.get()));
  return slab;
}

absl::StatusOr<std::unique_ptr<Slab>> Slab::CreateParts(absl::string_view name, SlabBacking backing, int64_t size_bytes,
                                                        const std::vector<Range>& allocated) {
  int64_t allocated_bytes = 0;
  for (const Range& range : allocated) allocated_bytes += range.end - range.first;
  std::unique_ptr<Slab> slab(new Slab());
  SHARDD_RETURN_IF_ERROR(slab->Open(name, backing, size_bytes, allocated_bytes));
  for (const Range& range : allocated) {
    const int64_t first = (range.first + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
    if (first < range.end) (void)MakeHugePages(slab->At<char>(first), range.end - first);
    SHARDD_RETURN_IF_ERROR(Reserve(name, slab->fd_.get(), range));
    SHARDD_RETURN_IF_ERROR(
        PopulatePages(slab->At<char>(range.first), range.end - range.first, /*writable=*/true, name));
  }
  SHARDD_RETURN_IF_ERROR(Seal(name, backing, slab->fd_.get()));
  return slab;
}

absl::StatusOr<std::unique_ptr<Slab>> Slab::TakeUp(absl::string_view name, UniqueFd fd, int64_t size_bytes) {
  struct stat object {};
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  const int64_t mapped_bytes = RoundUpToPage(size_bytes);
  if (fstat(fd.get(), &object) != 0 || size_bytes <= 0 || int64_t{object.st_size} != mapped_bytes || seals < 0 ||
      (seals & kSeals) != kSeals) {
    return absl::DataLossError(absl::StrCat("take up slab \"", name, "\": it is not what was made (got ",
                                            int64_t{object.st_size}, " bytes, seals ", seals, "; want ", mapped_bytes,
                                            " bytes that nobody can shrink)"));
  }
  std::unique_ptr<Slab> slab(new Slab());
  slab->name_ = std::string(name);
  slab->fd_ = std::move(fd);
  SHARDD_ASSIGN_OR_RETURN(slab->data_, MapShared(slab->fd_.get(), mapped_bytes, /*writable=*/true, name));
  slab->size_bytes_ = mapped_bytes;
  (void)madvise(slab->data_, static_cast<size_t>(mapped_bytes), MADV_HUGEPAGE);
  return slab;
}

std::vector<Slab::Range> Slab::Allocated(int64_t most_bytes) const {
  std::vector<Range> pieces;
  for (off_t at = lseek(fd_.get(), 0, SEEK_DATA); at >= 0 && at < size_bytes_;) {
    const off_t end = lseek(fd_.get(), at, SEEK_HOLE);
    for (int64_t first = at; first < end; first += most_bytes) {
      pieces.push_back({first, std::min<int64_t>(first + most_bytes, end)});
    }
    at = end < 0 ? -1 : lseek(fd_.get(), end, SEEK_DATA);
  }
  return pieces;
}

void Slab::MapPages(Range range) const {
  // A page that is mapped for reading may be written, too: this is shared memory. It is faster than for writing.
  (void)PopulatePages(At<char>(range.first), range.end - range.first, /*writable=*/false, name_);
}

Slab::~Slab() {
  // In pieces, so that other threads can map and fault in between.
  for (int64_t first = 0; data_ != nullptr && first < size_bytes_; first += kUnmapBytes) {
    munmap(static_cast<char*>(data_) + first, static_cast<size_t>(std::min(kUnmapBytes, size_bytes_ - first)));
  }
}

void Slab::Discard(Range range) {
  (void)fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, range.first, range.end - range.first);
}

absl::StatusOr<UniqueFd> Slab::ReadOnlyFd() const {
  UniqueFd fd(open(absl::StrCat("/proc/self/fd/", fd_.get()).c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) {
    return ErrnoStatus(errno, "reopen read-only slab", name_);
  }
  return fd;
}

absl::StatusOr<MappedSlab> MappedSlab::Map(UniqueFd fd, int64_t size_bytes, bool writable, bool keep_descriptor,
                                           MappedPages pages) {
  if (size_bytes <= 0 || size_bytes > INT64_MAX - 2 * kHugePageBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("map slab: size is out of range (got ", size_bytes, " bytes, want 1 or more)"));
  }
  struct stat object {};
  if (fstat(fd.get(), &object) != 0) {
    return ErrnoStatus(errno, "map slab", absl::StrCat("fd ", fd.get()));
  }
  // Pages beyond the end of the object would be SIGBUS at the first touch.
  if (!S_ISREG(object.st_mode) || int64_t{object.st_size} < size_bytes) {
    return absl::InternalError(absl::StrCat("map slab: the received object is too small or no memory (got ",
                                            S_ISREG(object.st_mode) ? int64_t{object.st_size} : -1, " bytes, want ",
                                            size_bytes, " bytes)"));
  }
  MappedSlab mapped;
  SHARDD_ASSIGN_OR_RETURN(mapped.data_, MapShared(fd.get(), size_bytes, writable, "received", pages));
  mapped.size_bytes_ = size_bytes;
  // A forked child of a dead trainer must not write into memory that the daemon has given to the replacement.
  if (madvise(mapped.data_, static_cast<size_t>(RoundUpToPage(size_bytes)), MADV_DONTFORK) != 0) {
    return ErrnoStatus(errno, "keep from forked children slab", "received");
  }
  // Pages that were given back stay unallocated until they are used. Those that there are take a third of the time if
  // they are mapped for reading, and may be written all the same.
  if (int64_t{object.st_blocks} * 512 >= size_bytes) {
    SHARDD_RETURN_IF_ERROR(PopulatePages(mapped.data_, size_bytes, /*writable=*/false, "received"));
  }
  if (keep_descriptor) {
    mapped.fd_ = std::move(fd);
  }
  return mapped;
}

absl::StatusOr<MappedSlab> MappedSlab::MakeOwn(int64_t size_bytes) {
  MappedSlab made;
  void* const data = mmap(nullptr, static_cast<size_t>(RoundUpToPage(size_bytes)), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    return ErrnoStatus(errno, "map slab", "of this process");
  }
  made.data_ = data;
  made.size_bytes_ = size_bytes;
  return made;
}

bool MappedSlab::MakePrivate() const {
  return mmap(data_, static_cast<size_t>(RoundUpToPage(size_bytes_)), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED,
              fd_.get(), 0) == data_;
}

MappedSlab::MappedSlab(MappedSlab&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)),
      fd_(std::move(other.fd_)) {}

MappedSlab& MappedSlab::operator=(MappedSlab&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  std::swap(fd_, other.fd_);
  return *this;
}

MappedSlab::~MappedSlab() {
  if (data_ != nullptr) {
    munmap(data_, static_cast<size_t>(RoundUpToPage(size_bytes_)));
  }
}

}  // namespace shardd
