#ifndef SHARDD_SERVER_DEVICE_CUDA_SURROUNDINGS_H_
#define SHARDD_SERVER_DEVICE_CUDA_SURROUNDINGS_H_

#include <string>
#include <vector>

#include "absl/types/span.h"
#include "common/cuda/driver.h"
#include "server/device/devices.h"

namespace shardd {

// The visible settings of GPUs, and of the process's environment, when a daemon starts. A setting that cannot be read
// is "unknown" with the reason, and causes no warning.
struct CudaSurroundings {
  std::vector<GpuFacts> gpus;  // in the order of the call's ordinals; without `description`
  std::vector<std::string> warnings;
};
// Asks the driver, NVML if it is there, and the environment. REQUIRES: the driver shows these GPUs. May block as long
// as both libraries do for a sick GPU.
CudaSurroundings ReadCudaSurroundings(const CudaDriver& driver, absl::Span<const int> ordinals);

}  // namespace shardd

#endif  // SHARDD_SERVER_DEVICE_CUDA_SURROUNDINGS_H_
