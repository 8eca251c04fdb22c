#ifndef SHARDD_TESTS_FAKES_CUDA_MEMORY_H_
#define SHARDD_TESTS_FAKES_CUDA_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "common/cuda/driver_api.h"

namespace shardd::fake_cuda {

inline constexpr size_t kMinimumGranularity = size_t{64} << 10;
inline constexpr size_t kRecommendedGranularity = size_t{2} << 20;
inline constexpr unsigned kHostRegisterReadOnly = 8;  // CU_MEMHOSTREGISTER_READ_ONLY

// What GPUs can reach: virtual memory over memfds, and registered host memory. A device address is the host's address
// of the same bytes, so tests can look. Results are those of the driver's functions of the same names. Thread-safe.
class Memory {
 public:
  struct Options {
    int gpus = 1;
    size_t bytes_per_gpu = 0;
    bool posix_fd = true;
    bool rdma = true;
    size_t pinned_bytes = SIZE_MAX;  // of registered host memory, at most
  };
  explicit Memory(const Options& options) : options_(options), used_(static_cast<size_t>(options.gpus)) {}
  ~Memory();

  CUresult Granularity(const CUmemAllocationProp* prop, int option, size_t* granularity) const;
  size_t FreeBytes(int gpu) const;
  CUresult Create(size_t size_bytes, const CUmemAllocationProp* prop, CUmemGenericAllocationHandle* handle);
  CUresult Release(CUmemGenericAllocationHandle handle);
  CUresult Export(CUmemGenericAllocationHandle handle, int handle_type, int* fd);
  CUresult Import(int fd, int handle_type, CUmemGenericAllocationHandle* handle);
  CUresult Reserve(size_t size_bytes, size_t alignment, CUdeviceptr* address);
  CUresult Free(CUdeviceptr address, size_t size_bytes);
  CUresult Map(CUdeviceptr address, size_t size_bytes, size_t offset, CUmemGenericAllocationHandle handle);
  CUresult Unmap(CUdeviceptr address, size_t size_bytes);
  CUresult SetAccess(CUdeviceptr address, size_t size_bytes, const CUmemAccessDesc* descs, size_t count);
  CUresult HostRegister(void* p, size_t size_bytes, unsigned flags);
  CUresult HostUnregister(void* p);
  CUresult HostDevicePointer(void* p, CUdeviceptr* address) const;

  // Whether all of [p, p + size_bytes) can be read, or written, by `gpu`.
  bool Reaches(int gpu, const void* p, size_t size_bytes, bool write) const;
  // Whether `gpu` has mapped any byte of it for reading alone. Not of registered memory.
  bool IsReadOnly(int gpu, const void* p, size_t size_bytes) const;
  // Whether any byte of it lies in a range of the driver's: then it is no pageable host memory.
  bool Knows(const void* p, size_t size_bytes) const;

  // Whether it lies in an address range for memory of GPUs; else it is the host's.
  bool IsOnGpu(const void* p) const;

  // What was made and not given back. For tests of leaks.
  struct Live {
    size_t handles = 0, reservations = 0, mappings = 0, registered = 0;
    bool operator==(const Live&) const = default;
  };
  Live live() const;

 private:
  // Bytes of one GPU: there while a handle or a mapping is.
  struct Physical {
    Physical(Memory* memory, int gpu, int fd, size_t size_bytes, bool counted)
        : memory(memory), gpu(gpu), fd(fd), size_bytes(size_bytes), counted(counted) {}
    ~Physical();
    Memory* const memory;
    const int gpu;
    const int fd;
    const size_t size_bytes;
    const bool counted;  // created here; another process' memory is counted there
  };
  struct Mapping {
    size_t size_bytes;
    size_t offset;
    std::shared_ptr<Physical> physical;
    std::map<int, int> access;  // of each GPU
  };

  // Of the host, pinned for all GPUs.
  struct Registered {
    size_t size_bytes;
    bool writable;
  };

  bool PropIsValid(const CUmemAllocationProp* prop) const;

  const Options options_;
  mutable std::mutex mutex_;
  std::vector<size_t> used_;
  size_t pinned_bytes_ = 0;
  CUmemGenericAllocationHandle next_handle_ = 1;
  std::map<CUmemGenericAllocationHandle, std::shared_ptr<Physical>> handles_;
  std::map<CUdeviceptr, size_t> reservations_;
  std::map<CUdeviceptr, Mapping> mappings_;
  std::map<uintptr_t, Registered> registered_;
};

}  // namespace shardd::fake_cuda

#endif  // SHARDD_TESTS_FAKES_CUDA_MEMORY_H_
