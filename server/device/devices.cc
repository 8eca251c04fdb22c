#include "server/device/devices.h"

#include <stdlib.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "common/cuda/driver.h"
#include "common/cuda/kernel_image.h"
#include "common/cuda/no_kernels.h"
#include "common/status/status_macros.h"
#include "server/device/cpu/cpu_device.h"
#include "server/device/cuda/make_cuda_devices.h"

namespace shardd {
namespace {

constexpr int kMaxDevices = 64;

#ifdef SHARDD_NO_GPUS
absl::StatusOr<Devices> MakeCuda(absl::string_view) {
  return absl::UnimplementedError(
      absl::StrCat(kNoGpuCode, "; run deploy/nvidia_headers.sh and build again, or run with --devices=cpu:N"));
}
#else
absl::StatusOr<Devices> MakeCuda(absl::string_view which) {
  SHARDD_ASSIGN_OR_RETURN(const CudaSelection selection, ParseCudaSelection(which));
  // A kernel that is loaded at its first use may wait for the whole GPU, and so for ever if a stream waits.
  setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0);
  SHARDD_ASSIGN_OR_RETURN(const CudaDriver driver, CudaDriver::Load());
  const auto built_in =
      absl::MakeConstSpan(static_cast<const unsigned char*>(cuda::kKernelImage), cuda::kKernelImageSizeBytes);
  return MakeCudaDevices(driver, selection, built_in.empty() ? driver.kernels() : built_in);
}
#endif

}  // namespace

absl::StatusOr<Devices> MakeDevices(absl::string_view spec) {
  const auto refuse = [spec](absl::string_view fact) {
    return absl::InvalidArgumentError(absl::StrCat("make devices: ", fact, " (got \"", spec,
                                                   "\", want cpu:N with N from 1 to ", kMaxDevices,
                                                   ", cuda:all or numbers of GPUs like cuda:0,1)"));
  };
  if (absl::StartsWith(spec, "cuda:")) {
    auto devices = MakeCuda(spec.substr(5));
    if (devices.ok()) return devices;
    const absl::Status& status = devices.status();
    return absl::Status(status.code(), absl::StrCat("make devices \"", spec, "\": ", status.message()));
  }
  if (!absl::StartsWith(spec, "cpu:")) return refuse("unknown kind of device");
  const absl::string_view digits = spec.substr(4);
  // SimpleAtoi also accepts spaces and signs.
  const bool plain = !digits.empty() && digits.find_first_not_of("0123456789") == absl::string_view::npos;
  int count = 0;
  if (!plain || !absl::SimpleAtoi(digits, &count) || count < 1 || count > kMaxDevices) {
    return refuse("number of devices is out of range");
  }
  Devices made;
  made.devices.reserve(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) made.devices.push_back(std::make_unique<CpuDevice>(absl::StrCat("cpu:", i)));
  return made;
}

}  // namespace shardd
