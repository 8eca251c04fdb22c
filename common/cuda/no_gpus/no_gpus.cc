// In the place of driver.cc and slab.cc in a build without NVIDIA's headers: there is no driver, and so no slab.

#include "absl/strings/str_cat.h"
#include "common/cuda/driver.h"
#include "common/cuda/no_kernels.h"
#include "common/cuda/slab.h"

namespace shardd {

absl::StatusOr<CudaDriver> CudaDriver::Load(const std::string& library) {
  return absl::FailedPreconditionError(absl::StrCat("load CUDA driver \"", library, "\": ", kNoGpuCode));
}
absl::StatusOr<int> CudaDriver::CountDevices() const { return 0; }
absl::Status CudaDriver::Check(CUresult result, absl::string_view operation, absl::string_view object,
                               absl::string_view) const {
  return absl::UnimplementedError(absl::StrCat(operation, " ", object, ": ", kNoGpuCode, " (result ", result, ")"));
}

void CudaSlab::Free() {}
void CudaSlab::Take(CudaSlab&) {}

}  // namespace shardd
