#ifndef SHARDD_COMMON_SHM_SLAB_H_
#define SHARDD_COMMON_SHM_SLAB_H_

// One large shared memory object of one job with one purpose, sub-allocated by plan. Memory is a descriptor: a slab is
// never reused across jobs, and not handing out its descriptor is the boundary between jobs. Each is a memfd whose size
// nobody can change any more, the daemon included: a size that shrinks under a mapping is SIGBUS for whoever reads it.

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
  kSealedMemfd,  // F_SEAL_SHRINK|GROW|SEAL: may be mapped for writing by whoever has a descriptor that allows it
  kFrozenMemfd,  // + F_SEAL_FUTURE_WRITE after the daemon has mapped it: nobody else ever writes; the daemon's page
};

// "sealed memfd", ...
absl::string_view SlabBackingName(SlabBacking backing);

// The daemon's side. Owns descriptor and mapping. Immutable after Create; the memory itself is shared.
class Slab {
 public:
  // Allocates (fallocate), maps read-write and populates every page, with huge pages where the kernel gives them, so
  // that no later touch can fail; then seals. size_bytes > 0, rounded up to whole pages. Blocks about 1 s per GiB (4
  // KiB pages). RESOURCE_EXHAUSTED: no memory (names free and wanted bytes and the remedy).
  static absl::StatusOr<std::unique_ptr<Slab>> Create(absl::string_view name, SlabBacking backing, int64_t size_bytes);
  // Bytes [first, end) of a slab, whole pages.
  struct Range {
    int64_t first = 0;
    int64_t end = 0;
  };
  // The same with memory for `held` alone, ascending and within size_bytes rounded up to pages, in small pages; the
  // rest reads zeros, and gets memory where it is touched. Whoever holds the descriptor can do that.
  static absl::StatusOr<std::unique_ptr<Slab>> CreateParts(absl::string_view name, SlabBacking backing,
                                                           int64_t size_bytes, const std::vector<Range>& held);
  ~Slab();  // unmaps, closes
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
  // True where the kernel maps every whole 2 MiB of the slab with a huge page (asked of the kernel, not assumed).
  bool huge_pages() const { return huge_pages_; }
  // The descriptor itself: for what a client may write.
  int fd() const { return fd_.get(); }
  // A new read-only descriptor (reopened O_RDONLY). What that is worth: a process of the same uid, and root of the
  // receiver's user namespace where it is the daemon's, can reopen it for writing; then it changes bytes, never the
  // size. kFrozenMemfd cannot be written by anybody.
  absl::StatusOr<UniqueFd> ReadOnlyFd() const;
  // Gives the pages back, whoever else still maps them or holds a descriptor; they then read zeros. Nothing for frozen
  // backings (the kernel refuses).
  void Discard();

 private:
  Slab() = default;
  // Descriptor, size and mapping; `held_bytes` of it are to be allocated.
  absl::Status Open(absl::string_view name, SlabBacking backing, int64_t size_bytes, int64_t held_bytes);
  std::string name_;
  SlabBacking backing_ = SlabBacking::kSealedMemfd;
  UniqueFd fd_;
  void* data_ = nullptr;
  int64_t size_bytes_ = 0;
  bool huge_pages_ = false;
};

// The client's side: a mapping of a received descriptor; DONTFORK, populated unless some of its pages were given back,
// the descriptor closed after mapping.
class MappedSlab {
 public:
  // Checks the object's size against `size_bytes` first (INTERNAL when it is smaller).
  // `keep_descriptor`: for MakePrivate; otherwise it is closed.
  static absl::StatusOr<MappedSlab> Map(UniqueFd fd, int64_t size_bytes, bool writable, bool keep_descriptor = false);
  // Of a writable mapping: whether stores reach it or fault. One system call; async-signal-safe.
  bool SetWritable(bool writable) const;
  // REQUIRES: keep_descriptor. Gives this process a copy of its own in place: stores go on and nobody sees them.
  // Async-signal-safe.
  bool MakePrivate() const;
  // The same for the huge page around `address`, which is copied at once: a fault for 2 MiB, not one for each small
  // page that is stored into. The rest keeps its protection. Nothing where it has been done. Async-signal-safe; one
  // thread at a time, and nobody stores into that huge page meanwhile (stores fault until it is done).
  bool MakePiecePrivate(const void* address) const;
  // REQUIRES: keep_descriptor. The other way: what this process stored is gone, and stores fault. Async-signal-safe.
  bool MakeShared() const;
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
  UniqueFd fd_;  // keep_descriptor
  // keep_descriptor: by huge page of the address space, whether MakePiecePrivate has copied it. Made by Map, because a
  // signal handler cannot allocate.
  mutable std::vector<char> is_private_;
};

// What this node can still give, and why not more.
struct MemoryLimits {
  int64_t free_bytes = 0;  // MemAvailable, or the cgroup's limit less its use if that is smaller (v1 and v2)
  std::string limited_by;  // "cgroup memory.max", "cgroup memory.limit_in_bytes", "MemAvailable"
};
// `root`: prefix of /proc and /sys/fs/cgroup, for tests.
absl::StatusOr<MemoryLimits> GetMemoryLimits(const std::string& root = "");

// RESOURCE_EXHAUSTED, naming both numbers and the remedy, when `want_bytes` are more than what is free. A memfd has no
// limit of its own: without this look before, too large an allocation ends in the OOM killer and not in a status.
absl::Status CheckMemory(const MemoryLimits& limits, int64_t want_bytes);

}  // namespace shardd

#endif  // SHARDD_COMMON_SHM_SLAB_H_
