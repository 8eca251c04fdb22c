#ifndef SHARDD_COMMON_CUDA_SLAB_H_
#define SHARDD_COMMON_CUDA_SLAB_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/cuda/driver.h"
#include "common/shm/unique_fd.h"

namespace shardd {

// One slab on a GPU, or over several: physical memory by cuMemCreate, mapped once, shared by POSIX descriptors. One
// range of addresses, of pieces that lie side by side; each piece is an allocation of its own on one GPU, because
// cuMemMap takes an allocation from its beginning alone (its offset must be 0). The memory lives until the last
// mapping, handle and descriptor of any process is gone, so it survives its creator's death while somebody holds one.
// Never legacy CUDA IPC, never cudaMalloc and cudaFree, which synchronise the device. Not for the step path: each call
// may take milliseconds. Needs no current context. Move-only; thread-compatible; `driver` outlives it.
class CudaSlab {
 public:
  struct Piece {
    cu::Ordinal device = 0;
    int64_t size_bytes = 0;
  };
  // What the importer's GPU may do. The importer chooses: this stops accidents, not a hostile process. A kernel that
  // writes through a read-only mapping takes its process' whole context with it (CUDA_ERROR_ILLEGAL_ADDRESS); a copy
  // or memset there is refused by the call (CUDA_ERROR_INVALID_VALUE).
  enum class Access { kReadOnly, kReadWrite };

  // At least `size_bytes` > 0 on `device`, read-write, rounded up to the RECOMMENDED granularity (2 MiB today), which
  // NCCL's registration wants for size and address too. gpuDirectRDMACapable where the device has that. The content is
  // undefined. `name` is what errors call it: "slab shards of job a". `peers`: other GPUs that read and write it too.
  // RESOURCE_EXHAUSTED: the GPU is full; UNIMPLEMENTED: a device without virtual memory management or POSIX
  // descriptors; FAILED_PRECONDITION: a peer that does not reach the memory of `device`.
  static absl::StatusOr<CudaSlab> Create(const CudaDriver* driver, cu::Ordinal device, int64_t size_bytes,
                                         std::string name, absl::Span<const cu::Ordinal> peers = {});
  // Of several pieces, in this order, read-write for `users`, which need not own any. Sizes are multiples of
  // Granularity() of their GPUs (INVALID_ARGUMENT otherwise). Errors as of Create, and nothing is left behind.
  static absl::StatusOr<CudaSlab> CreateSpread(const CudaDriver* driver, absl::Span<const Piece> pieces,
                                               std::string name, absl::Span<const cu::Ordinal> users);
  // What sizes of pieces on `device` are multiples of: the RECOMMENDED granularity.
  static absl::StatusOr<int64_t> Granularity(const CudaDriver& driver, cu::Ordinal device);
  // Maps what another slab's ExportFd gave, also in another process, for `device`, which must see the GPU that owns the
  // memory. size_bytes: that of the exported slab, as it says itself. `fd` is not consumed and may be closed at once.
  static absl::StatusOr<CudaSlab> Import(const CudaDriver* driver, cu::Ordinal device, int fd, int64_t size_bytes,
                                         Access access, std::string name);

  // Likewise for a slab of several pieces: `next` is asked for the descriptor of each in turn, which is closed as soon
  // as it is imported, so that no process ever has to have as many open as a slab has pieces. Its error is passed on.
  using NextFd = std::function<absl::StatusOr<UniqueFd>()>;
  static absl::StatusOr<CudaSlab> ImportSpread(const CudaDriver* driver, cu::Ordinal device,
                                               absl::Span<const int64_t> piece_bytes, const NextFd& next, Access access,
                                               std::string name);

  CudaSlab() = default;
  CudaSlab(CudaSlab&& other) noexcept { Take(other); }
  CudaSlab& operator=(CudaSlab&& other) noexcept {
    if (this != &other) {
      Free();
      Take(other);
    }
    return *this;
  }
  // REQUIRES: no operation that was submitted to a device still names this memory.
  ~CudaSlab() { Free(); }

  // Forgets the memory without a call of the driver, for a GPU that hangs: unmapping might wait for it, for ever. The
  // memory stays allocated until the process ends.
  void Abandon();

  // A new descriptor for the memory of one piece, CLOEXEC; it keeps that memory alive by itself.
  absl::StatusOr<UniqueFd> ExportFd(size_t piece = 0) const;

  bool valid() const { return address_ != 0; }
  void* data() const { return reinterpret_cast<void*>(address_); }          // of the device: not for the host to read
  int64_t size_bytes() const { return static_cast<int64_t>(size_bytes_); }  // a multiple of the granularity
  bool gpu_direct_rdma() const { return gpu_direct_rdma_; }                 // of a created slab: of all its pieces
  size_t pieces() const { return pieces_.size(); }

 private:
  struct Mapped {
    cu::Ordinal device = 0;  // that owns it; of an imported one, that it is mapped for
    size_t size_bytes = 0;
    cu::MemHandle handle = 0;
    bool is_mapped = false;
  };
  absl::Status Reserve(size_t size_bytes, cu::Ordinal device);  // `device`: whom errors name
  absl::Status CreatePiece(const Piece& piece, const cu::MemAllocationProp& prop);
  absl::Status MapLast();  // the last of pieces_, behind the others
  absl::Status SetAccess(Access access, absl::Span<const cu::Ordinal> users);
  void Free();
  void Take(CudaSlab& other);

  const CudaDriver* driver_ = nullptr;
  std::string name_;
  std::vector<Mapped> pieces_;
  cu::DevicePtr address_ = 0;
  size_t size_bytes_ = 0;
  bool gpu_direct_rdma_ = false;
};

}  // namespace shardd

#endif  // SHARDD_COMMON_CUDA_SLAB_H_
