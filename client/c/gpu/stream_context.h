#ifndef SHARDD_CLIENT_C_GPU_STREAM_CONTEXT_H_
#define SHARDD_CLIENT_C_GPU_STREAM_CONTEXT_H_

// What the library's own streams need on the rank's GPU.

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/cuda/driver.h"

namespace shardd {

// Retains the primary context of GPU `ordinal`, which the caller releases (cuDevicePrimaryCtxRelease). On an error
// *context is as it was.
absl::Status RetainRanksContext(const CudaDriver& driver, int ordinal, CUdevice* device, CUcontext* context);
// Whether streams of the GPU write 64-bit words and wait for them.
absl::StatusOr<bool> HasStreamMemoryOperations(const CudaDriver& driver, CUdevice device);
// A stream of the current context that goes before those of usual priority. `what`: what it is for, in errors.
absl::StatusOr<CUstream> CreateFirstStream(const CudaDriver& driver, const char* what);

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_GPU_STREAM_CONTEXT_H_
