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

// One slab on one GPU or over several: a range of addresses made of pieces that lie side by side. Each piece is one
// cuMemCreate allocation on one GPU, because cuMemMap maps an allocation only from its beginning (its offset must be
// 0), and is shared as a POSIX descriptor. The memory lives until the last mapping, handle and descriptor of any
// process is gone, so it can survive its creator. Legacy CUDA IPC is never used, nor cudaMalloc and cudaFree, which
// synchronise the device. Each call may take milliseconds: not for the step path. Needs no current context. Move-only;
// thread-compatible; `driver` must outlive it.
class CudaSlab {
 public:
  static constexpr CUdevice kHole = -1;
  struct Piece {
    CUdevice device = 0;  // kHole: addresses without memory, which nobody may follow
    int64_t size_bytes = 0;
  };
  // Access of the importer's GPU. The importer chooses it, so it stops accidents and not a hostile process. A kernel
  // that writes through a read-only mapping loses its process' whole context (CUDA_ERROR_ILLEGAL_ADDRESS); a copy or
  // memset there fails in the call (CUDA_ERROR_INVALID_VALUE).
  enum class Access { kReadOnly, kReadWrite };

  // Creates at least `size_bytes` > 0 on `device`, read-write, rounded up to the RECOMMENDED granularity (2 MiB today),
  // which NCCL's registration requires of size and address too; gpuDirectRDMACapable if the device has that. The
  // content is undefined. Errors name it `name` ("slab shards of job a"). `peers`: other GPUs that also read and write
  // it. RESOURCE_EXHAUSTED: the GPU is full; UNIMPLEMENTED: the device lacks virtual memory management or POSIX
  // descriptors; FAILED_PRECONDITION: a peer cannot access the memory of `device`.
  static absl::StatusOr<CudaSlab> Create(const CudaDriver* driver, CUdevice device, int64_t size_bytes,
                                         std::string name, absl::Span<const CUdevice> peers = {});
  // Creates a slab of several pieces, in this order, read-write for `users`, which need not own any piece. Sizes must
  // be multiples of Granularity() of their GPUs (INVALID_ARGUMENT otherwise), holes' of the first one's; the first is
  // no hole. Errors as of Create; an error leaves nothing behind.
  static absl::StatusOr<CudaSlab> CreateSpread(const CudaDriver* driver, absl::Span<const Piece> pieces,
                                               std::string name, absl::Span<const CUdevice> users);
  // The RECOMMENDED granularity: sizes of pieces on `device` are multiples of it.
  static absl::StatusOr<int64_t> Granularity(const CudaDriver& driver, CUdevice device);
  // Maps the memory of another slab's ExportFd, possibly from another process, for `device`, which must see the GPU
  // that owns the memory. size_bytes: size_bytes() of the exported slab. The caller keeps `fd` and may close it at
  // once.
  static absl::StatusOr<CudaSlab> Import(const CudaDriver* driver, CUdevice device, int fd, int64_t size_bytes,
                                         Access access, std::string name);

  // The same for a slab of several pieces, and for `peers` besides. Calls `next` for the descriptor of each piece in
  // turn and closes each as soon as it is imported, so that no process needs as many open descriptors as a slab has
  // pieces. A negative size is a hole of so many bytes, which has no descriptor. Returns an error of `next`.
  using NextFd = std::function<absl::StatusOr<UniqueFd>()>;
  static absl::StatusOr<CudaSlab> ImportSpread(const CudaDriver* driver, CUdevice device,
                                               absl::Span<const int64_t> piece_bytes, const NextFd& next, Access access,
                                               std::string name, absl::Span<const CUdevice> peers = {});

  CudaSlab() = default;
  CudaSlab(CudaSlab&& other) noexcept { Take(other); }
  CudaSlab& operator=(CudaSlab&& other) noexcept {
    if (this != &other) {
      Free();
      Take(other);
    }
    return *this;
  }
  // REQUIRES: no submitted operation of a device still uses this memory.
  ~CudaSlab() { Free(); }

  // Forgets the memory without calling the driver, for a GPU that hangs: unmapping might wait for ever. The memory
  // stays allocated until the process ends.
  void Abandon();

  // A new descriptor for the memory of one piece, CLOEXEC; it keeps that memory alive. REQUIRES: it is no hole.
  absl::StatusOr<UniqueFd> ExportFd(size_t piece = 0) const;

  bool valid() const { return address_ != 0; }
  void* data() const { return reinterpret_cast<void*>(address_); }          // device address: the host must not read it
  int64_t size_bytes() const { return static_cast<int64_t>(size_bytes_); }  // a multiple of the granularity
  bool gpu_direct_rdma() const { return gpu_direct_rdma_; }                 // created slabs: of all pieces
  size_t pieces() const { return pieces_.size(); }                          // holes included

 private:
  struct Mapped {
    CUdevice device = 0;  // the owner; of an imported piece, the device it is mapped for
    size_t size_bytes = 0;
    CUmemGenericAllocationHandle handle = 0;
    bool is_mapped = false;
  };
  absl::Status Reserve(size_t size_bytes, CUdevice device);  // `device`: for errors
  absl::Status CreatePiece(const Piece& piece, const CUmemAllocationProp& prop);
  absl::Status MapLast();  // maps the last of pieces_ after the others
  absl::Status SetAccess(Access access, absl::Span<const CUdevice> users);
  absl::Status SetAccessOfRuns(const CUmemAccessDesc& desc, CUdevice user);  // of what is between holes
  void Free();
  void Take(CudaSlab& other);

  const CudaDriver* driver_ = nullptr;
  std::string name_;
  std::vector<Mapped> pieces_;
  CUdeviceptr address_ = 0;
  size_t size_bytes_ = 0;
  bool gpu_direct_rdma_ = false;
};

}  // namespace shardd

#endif  // SHARDD_COMMON_CUDA_SLAB_H_
