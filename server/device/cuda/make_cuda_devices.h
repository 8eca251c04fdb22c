#ifndef SHARDD_SERVER_DEVICE_CUDA_MAKE_CUDA_DEVICES_H_
#define SHARDD_SERVER_DEVICE_CUDA_MAKE_CUDA_DEVICES_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/cuda/driver.h"
#include "server/device/devices.h"

namespace shardd {

// The part after "cuda:" in --devices.
struct CudaSelection {
  bool all = false;
  std::vector<int> ordinals;  // in the given order, each once; empty with all
};
// Parses "all", "0", "0,2". INVALID_ARGUMENT for anything else.
absl::StatusOr<CudaSelection> ParseCudaSelection(absl::string_view text);

// Makes the devices of the selection, named by ordinal, and reads their environment. FAILED_PRECONDITION: no such GPU
// (text: how many there are); otherwise errors of CudaEngine::Create.
absl::StatusOr<Devices> MakeCudaDevices(const CudaDriver& driver, const CudaSelection& selection,
                                        absl::Span<const unsigned char> kernels);

}  // namespace shardd

#endif  // SHARDD_SERVER_DEVICE_CUDA_MAKE_CUDA_DEVICES_H_
