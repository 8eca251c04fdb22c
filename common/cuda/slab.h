#ifndef SHARDD_COMMON_CUDA_SLAB_H_
#define SHARDD_COMMON_CUDA_SLAB_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/cuda/driver.h"
#include "common/shm/unique_fd.h"

namespace shardd {

// One slab on a GPU: physical memory by cuMemCreate, mapped once, shared by a POSIX descriptor. The memory lives until
// the last mapping, handle and descriptor of any process is gone, so it survives its creator's death while somebody
// holds one. Never legacy CUDA IPC, never cudaMalloc and cudaFree, which synchronise the device. Not for the step path:
// each call may take milliseconds. Needs no current context. Move-only; thread-compatible; `driver` outlives it.
class CudaSlab {
 public:
  // What the importer's GPU may do. The importer chooses: this stops accidents, not a hostile process. A kernel that
  // writes through a read-only mapping takes its process' whole context with it (CUDA_ERROR_ILLEGAL_ADDRESS).
  enum class Access { kReadOnly, kReadWrite };

  // At least `size_bytes` > 0 on `device`, read-write, rounded up to the RECOMMENDED granularity (2 MiB today), which
  // NCCL's registration wants for size and address too. gpuDirectRDMACapable where the device has that. The content is
  // undefined. `name` is what errors call it: "slab shards of job a". `peers`: other GPUs that read and write it too.
  // RESOURCE_EXHAUSTED: the GPU is full; UNIMPLEMENTED: a device without virtual memory management or POSIX
  // descriptors; FAILED_PRECONDITION: a peer that does not reach the memory of `device`.
  static absl::StatusOr<CudaSlab> Create(const CudaDriver* driver, cu::Ordinal device, int64_t size_bytes,
                                         std::string name, absl::Span<const cu::Ordinal> peers = {});
  // Maps what another slab's ExportFd gave, also in another process, for `device`, which must see the GPU that owns the
  // memory. size_bytes: that of the exported slab, as it says itself. `fd` is not consumed and may be closed at once.
  static absl::StatusOr<CudaSlab> Import(const CudaDriver* driver, cu::Ordinal device, int fd, int64_t size_bytes,
                                         Access access, std::string name);

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

  // A new descriptor for the memory, CLOEXEC; it keeps the memory alive by itself.
  absl::StatusOr<UniqueFd> ExportFd() const;

  bool valid() const { return address_ != 0; }
  void* data() const { return reinterpret_cast<void*>(address_); }          // of the device: not for the host to read
  int64_t size_bytes() const { return static_cast<int64_t>(size_bytes_); }  // a multiple of the granularity
  bool gpu_direct_rdma() const { return gpu_direct_rdma_; }                 // of a created slab

 private:
  absl::Status Map(Access access, absl::Span<const cu::Ordinal> peers);
  void Free();
  void Take(CudaSlab& other);

  const CudaDriver* driver_ = nullptr;
  cu::Ordinal device_ = 0;
  std::string name_;
  cu::MemHandle handle_ = 0;
  bool has_handle_ = false;
  cu::DevicePtr address_ = 0;
  bool mapped_ = false;
  size_t size_bytes_ = 0;
  bool gpu_direct_rdma_ = false;
};

}  // namespace shardd

#endif  // SHARDD_COMMON_CUDA_SLAB_H_
