#ifndef SHARDD_SERVER_DEVICE_CUDA_SURROUNDINGS_H_
#define SHARDD_SERVER_DEVICE_CUDA_SURROUNDINGS_H_

#include <string>
#include <vector>

#include "absl/types/span.h"
#include "common/cuda/driver.h"
#include "server/device/device.h"

namespace shardd {

// What can be seen of GPUs' settings, and of the process's environment, when a daemon starts. A setting that cannot be
// read is "unknown" with the reason, and no warning.
struct CudaSurroundings {
  std::vector<GpuFacts> gpus;  // by ordinal of the call; without `description`
  std::vector<std::string> warnings;
};
// Asks the driver, NVML where it is there, and the environment. REQUIRES: the driver shows these GPUs. May block, as
// both libraries may, for as long as a sick GPU makes them.
CudaSurroundings ReadCudaSurroundings(const CudaDriver& driver, absl::Span<const int> ordinals);

}  // namespace shardd

#endif  // SHARDD_SERVER_DEVICE_CUDA_SURROUNDINGS_H_
