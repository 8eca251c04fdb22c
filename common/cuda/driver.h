#ifndef SHARDD_COMMON_CUDA_DRIVER_H_
#define SHARDD_COMMON_CUDA_DRIVER_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/cuda/driver_api.h"

namespace shardd {

// The machine's driver, or a fake: a table of its functions, and errors in its words. Nothing of it is linked, so the
// same binary starts on machines without a driver. Immutable.
class CudaDriver {
 public:
  // Loads the driver with dlopen, resolves every function with cuGetProcAddress, and calls cuInit. `library` replaces
  // the name "libcuda.so.1". FAILED_PRECONDITION: there is no such library, it is older than CUDA 12.0, or cuInit
  // refuses (no GPU, no device files). The text has the name that was tried and the answer of the loader or the driver.
  // The library stays loaded.
  static absl::StatusOr<CudaDriver> Load(const std::string& library = "libcuda.so.1");
  // Wraps a table and calls nothing. REQUIRES: every pointer is set.
  explicit CudaDriver(const cu::DriverTable& table) : table_(table) {}

  const cu::DriverTable* operator->() const { return &table_; }
  // The fat binary that the library itself exports for builds without one (cu::DriverKernels); empty for NVIDIA's
  // library.
  absl::Span<const unsigned char> kernels() const { return kernels_; }

  // GPUs that this process sees.
  absl::StatusOr<int> CountDevices() const;

  // OK for CUDA_SUCCESS. Else "<operation> <object>: CUDA_ERROR_X: text (result 700, device=..)" with the code
  // RESOURCE_EXHAUSTED for memory, UNIMPLEMENTED for what the device or driver cannot do, FAILED_PRECONDITION if there
  // is no such device, DATA_LOSS if the device is lost (IsLost), INTERNAL for everything else. `operation` is the
  // driver's name of the call ("cuMemCreate"); `device` is empty if there is none.
  absl::Status Check(CUresult result, absl::string_view operation, absl::string_view object,
                     absl::string_view device = "") const;

  // True if the context and everything in it are unusable from here on: every later call gives the same error.
  static bool IsLost(CUresult result);

 private:
  cu::DriverTable table_;
  absl::Span<const unsigned char> kernels_;  // of the library, which stays loaded
};

// Makes a context current on this thread; the destructor restores the previous one.
class ScopedCudaContext {
 public:
  ScopedCudaContext(const CudaDriver& driver, CUcontext context);
  ScopedCudaContext(const ScopedCudaContext&) = delete;
  ScopedCudaContext& operator=(const ScopedCudaContext&) = delete;
  ~ScopedCudaContext();
  CUresult result() const { return result_; }

 private:
  const CudaDriver& driver_;
  const CUresult result_;
};

}  // namespace shardd

#endif  // SHARDD_COMMON_CUDA_DRIVER_H_
