#ifndef SHARDD_COMMON_SHM_SLAB_H_
#define SHARDD_COMMON_SHM_SLAB_H_

// One large shared memory object of one job with one purpose, sub-allocated by plan. A slab is a descriptor that is
// never reused across jobs: not handing it out is the boundary between jobs. Each is a memfd whose size nobody can
// change, not even the daemon, because readers of a mapping whose object shrinks get SIGBUS.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/shm/unique_fd.h"

namespace shardd {

enum class SlabBacking {
  kSealedMemfd,  // F_SEAL_SHRINK|GROW|SEAL: holders of a writable descriptor may map it for writing
  kFrozenMemfd,  // + F_SEAL_FUTURE_WRITE after the daemon has mapped it: nobody else ever writes it; for the daemon's
                 // page
};

// The backing's name: "sealed memfd", ...
absl::string_view SlabBackingName(SlabBacking backing);

// The daemon's side. Owns descriptor and mapping. Immutable after Create, but the memory is shared.
class Slab {
 public:
  // Allocates (fallocate), maps read-write and populates every page, in huge pages if the kernel gives them, so that no
  // later touch can fail; then seals. size_bytes > 0 is rounded up to whole pages. Blocks about 0.1 s per GiB, 1 s if
  // the kernel has no huge pages. RESOURCE_EXHAUSTED: no memory (names free and wanted bytes, and the remedy).
  static absl::StatusOr<std::unique_ptr<Slab>> Create(absl::string_view name, SlabBacking backing, int64_t size_bytes);
  // Bytes [first, end) of a slab, in whole pages.
  struct Range {
    int64_t first = 0;
    int64_t end = 0;
  };
  // The same, but allocates only the ranges `allocated` (ascending, within size_bytes rounded up to pages). The rest
  // reads as zeros and gets memory when it is touched, which every holder of the descriptor can do.
  static absl::StatusOr<std::unique_ptr<Slab>> CreateParts(absl::string_view name, SlabBacking backing,
                                                           int64_t size_bytes, const std::vector<Range>& allocated);
  // As Create, but pages that are no huge ones come when they are touched, which fails where memory is out by then.
  static absl::StatusOr<std::unique_ptr<Slab>> CreateLate(absl::string_view name, SlabBacking backing,
                                                          int64_t size_bytes);
  // Maps what the daemon before this one has made, of the same size, and a custodian has kept. Pages are mapped when
  // they are touched. DATA_LOSS: it is something else, or somebody could change its size.
  static absl::StatusOr<std::unique_ptr<Slab>> TakeUp(absl::string_view name, UniqueFd fd, int64_t size_bytes);
  ~Slab();  // unmaps and closes
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  const std::string& name() const { return name_; }
  SlabBacking backing() const { return backing_; }
  void* data() const { return data_; }
  template <typename T>
  T* At(int64_t offset_bytes) const {
    return reinterpret_cast<T*>(static_cast<char*>(data_) + offset_bytes);
  }
  int64_t size_bytes() const { return size_bytes_; }
  // True if the kernel maps every whole 2 MiB of the slab with a huge page (as the kernel reports, not assumed).
  bool huge_pages() const { return huge_pages_; }
  // The slab's own descriptor, for what a client may write.
  int fd() const { return fd_.get(); }
  // A new read-only descriptor (reopened O_RDONLY). Its protection is limited: a process of the same uid, and root of
  // the receiver's user namespace if that is the daemon's, can reopen it for writing and change bytes, but never the
  // size. Nobody can write kFrozenMemfd.
  absl::StatusOr<UniqueFd> ReadOnlyFd() const;
  // The parts that have pages, in pieces of at most `most_bytes`.
  std::vector<Range> Allocated(int64_t most_bytes) const;
  // Maps the pages of a part that has them, so that no later touch has to: 0.1 s per GiB, where touches take 0.4 s.
  void MapPages(Range range) const;
  // Frees the pages, even if others map them or have a descriptor; they then read zeros. Does nothing for frozen
  // backings, because the kernel refuses.
  void Discard() { Discard({0, size_bytes_}); }
  void Discard(Range range);

 private:
  Slab() = default;
  // Opens descriptor, size and mapping; `allocated_bytes` of it will be allocated.
  absl::Status Open(absl::string_view name, SlabBacking backing, int64_t size_bytes, int64_t allocated_bytes);
  std::string name_;
  SlabBacking backing_ = SlabBacking::kSealedMemfd;
  UniqueFd fd_;
  void* data_ = nullptr;
  int64_t size_bytes_ = 0;
  bool huge_pages_ = false;
};

enum class MappedPages {
  kAny,
  kSmall,  // the address allows no huge ones: for private mappings, whose stores are found by page
};

// The client's side: the mapping of a received descriptor, with DONTFORK, populated unless some of its pages were given
// back. The descriptor is closed after mapping.
class MappedSlab {
 public:
  // Maps `fd`. INTERNAL: the object is smaller than `size_bytes`. `keep_descriptor`: keeps the descriptor for
  // MakePrivate.
  static absl::StatusOr<MappedSlab> Map(UniqueFd fd, int64_t size_bytes, bool writable, bool keep_descriptor = false,
                                        MappedPages pages = MappedPages::kAny);
  // Memory of this process alone, zeros, which gets pages when it is touched.
  static absl::StatusOr<MappedSlab> MakeOwn(int64_t size_bytes);
  // REQUIRES: keep_descriptor. Replaces the mapping by a private copy of this process: stores succeed and nobody else
  // sees them.
  bool MakePrivate() const;
  MappedSlab() = default;
  MappedSlab(MappedSlab&& other) noexcept;
  MappedSlab& operator=(MappedSlab&& other) noexcept;
  ~MappedSlab();
  void* data() const { return data_; }
  template <typename T>
  T* At(int64_t offset_bytes) const {
    return reinterpret_cast<T*>(static_cast<char*>(data_) + offset_bytes);
  }
  int64_t size_bytes() const { return size_bytes_; }

 private:
  void* data_ = nullptr;
  int64_t size_bytes_ = 0;
  UniqueFd fd_;  // with keep_descriptor
};

// Memory that this node can still give, and the limit that applies.
struct MemoryLimits {
  int64_t free_bytes = 0;      // MemAvailable, or the cgroup's limit minus its use if that is smaller (v1 and v2)
  std::string limited_by;      // "cgroup memory.max", "cgroup memory.limit_in_bytes", "MemAvailable"
  bool of_own_cgroup = false;  // and of none around it
};
// `root`: prefix of /proc and /sys/fs/cgroup, for tests.
absl::StatusOr<MemoryLimits> GetMemoryLimits(const std::string& root = "");

// RESOURCE_EXHAUSTED, with both numbers and the remedy: `want_bytes` exceeds what is free. A memfd has no limit of its
// own: without this check, too large an allocation ends in the OOM killer instead of a status.
absl::Status CheckMemory(const MemoryLimits& limits, int64_t want_bytes);

}  // namespace shardd

#endif  // SHARDD_COMMON_SHM_SLAB_H_
