#ifndef SHARDD_TESTS_E2E_RANKS_DEVICE_VALUES_H_
#define SHARDD_TESTS_E2E_RANKS_DEVICE_VALUES_H_

// How a rank whose "kernels" are functions of the host reads parameters and writes gradients: where a job's pointers
// are a GPU's, no thread of the host may follow one, so the driver copies. On the fake driver too, whose addresses the
// host could follow.

#include <cstddef>
#include <memory>

#include "common/cuda/driver.h"

namespace shardd::e2e {

// A rank's GPU, by the machine's driver or the fake: its primary context, and copies in streams of it. A call that the
// driver refuses ends the process with the driver's words. Thread-compatible.
class RankGpu {
 public:
  // `ordinal`: shardd_job_info.cuda_device, as this process numbers its GPUs.
  explicit RankGpu(int ordinal);
  const CudaDriver& driver() const { return driver_; }
  CUstream MakeStream() const;  // that waits for no other
  // Host memory is pinned (Pinned), or the call waits for the stream.
  void Copy(CUstream stream, void* to, const void* from, size_t size_bytes) const;
  void Launch(CUstream stream, CUhostFn function, void* user_data) const;
  void Synchronise(CUstream stream) const;
  void BeginCapture(CUstream stream) const;
  CUgraphExec EndCapture(CUstream stream) const;
  void DropGraph(CUgraphExec exec) const;
  // Host memory that streams copy from and to behind the host's back. It stays for the life of the process.
  void* Pinned(size_t size_bytes) const;

 private:
  void Must(CUresult result, const char* call) const;

  CudaDriver driver_;
  CUcontext context_ = nullptr;
};

// What pointers of a job name, on whichever side it lies. Each call returns when the bytes are there.
class DeviceValues {
 public:
  // As RankGpu; -1: memory of the host, which is copied as such.
  void Use(int cuda_device);
  void Read(void* to, const void* from, size_t size_bytes) const { Copy(to, from, size_bytes); }
  void Write(void* to, const void* from, size_t size_bytes) const { Copy(to, from, size_bytes); }

 private:
  void Copy(void* to, const void* from, size_t size_bytes) const;

  int cuda_device_ = -1;
  std::unique_ptr<RankGpu> gpu_;
  CUstream stream_ = nullptr;
};

}  // namespace shardd::e2e

#endif  // SHARDD_TESTS_E2E_RANKS_DEVICE_VALUES_H_
