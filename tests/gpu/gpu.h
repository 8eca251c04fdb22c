#ifndef SHARDD_TESTS_GPU_GPU_H_
#define SHARDD_TESTS_GPU_GPU_H_

#include <memory>
#include <string>
#include <vector>

#include "common/cuda/driver.h"
#include "common/cuda/slab.h"
#include "server/job/wait.h"
#include "tests/server/device/kernel_runner.h"

namespace shardd::cuda {

// The first GPU that this process sees, with the kernels of this binary and one stream. A call that the driver refuses
// ends the process with the driver's words: nothing after it could be believed.
class Gpu {
 public:
  // One for the process. nullptr where there is none: *why is the reason.
  static Gpu* Get(std::string* why);

  int multiprocessors() const { return multiprocessors_; }
  const std::string& name() const { return name_; }  // "NVIDIA H200, 132 multiprocessors, driver for CUDA 13.0"
  const CudaDriver& driver() const { return driver_; }
  CudaSlab Allocate(int64_t size_bytes);
  // None of these waits.
  void Copy(const void* src, void* dst, int64_t size_bytes);
  void Zero(void* dst, int64_t size_bytes);
  // grid 0: as GeometryOf says; null: stream().
  void Launch(const AnyArgs& args, uint32_t grid, CUstream stream = nullptr);
  void Wait();

  CUstream stream() const { return stream_; }
  CUstream NewStream();  // lives as long as the process
  // A kernel of load.cu, none of the product's.
  CUkernel LoadKernel(const char* name);
  void Check(CUresult result, const char* operation) const;

 private:
  explicit Gpu(const CudaDriver& driver) : driver_(driver) {}
  std::string Init();  // empty, or why not
  void LaunchOne(const char* kernel, Geometry at, const void* args, CUstream stream);

  const CudaDriver driver_;
  std::string name_;
  CUdevice device_ = 0;
  int multiprocessors_ = 0;
  CUstream stream_ = nullptr;
  CUlibrary library_ = nullptr;
  CUlibrary load_library_ = nullptr;
};

}  // namespace shardd::cuda

#endif  // SHARDD_TESTS_GPU_GPU_H_
