#include "server/device/cuda/make_cuda_devices.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/cuda/no_kernels.h"
#include "common/status/status_macros.h"
#include "server/device/cuda/cuda_device.h"
#include "server/device/cuda/surroundings.h"
#include "server/device/devices.h"

namespace shardd {

absl::StatusOr<CudaSelection> ParseCudaSelection(absl::string_view text) {
  CudaSelection selection;
  if (text == "all") {
    selection.all = true;
    return selection;
  }
  for (const absl::string_view part : absl::StrSplit(text, ',')) {
    int ordinal = 0;
    // SimpleAtoi also accepts spaces and signs.
    const bool plain = !part.empty() && part.find_first_not_of("0123456789") == absl::string_view::npos;
    const auto& known = selection.ordinals;
    if (!plain || !absl::SimpleAtoi(part, &ordinal) || std::find(known.begin(), known.end(), ordinal) != known.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("no list of GPUs (got \"", text, "\", want \"all\" or numbers, each once, like \"0,1\")"));
    }
    selection.ordinals.push_back(ordinal);
  }
  return selection;
}

absl::StatusOr<Devices> MakeCudaDevices(const CudaDriver& driver, const CudaSelection& selection,
                                        absl::Span<const unsigned char> kernels) {
  int count = 0;
  SHARDD_RETURN_IF_ERROR(driver.Check(driver->DeviceGetCount(&count), "cuDeviceGetCount", ""));
  std::vector<int> ordinals = selection.ordinals;
  for (int i = 0; selection.all && i < count; ++i) ordinals.push_back(i);
  const auto beyond = std::find_if(ordinals.begin(), ordinals.end(), [count](int i) { return i >= count; });
  if (ordinals.empty() || beyond != ordinals.end()) {
    return absl::FailedPreconditionError(absl::StrCat("find GPU", ordinals.empty() ? "s" : absl::StrCat(" ", *beyond),
                                                      ": the driver shows ", count,
                                                      " (CUDA_VISIBLE_DEVICES may hide some)"));
  }
  if (kernels.empty()) {
    return absl::UnimplementedError(absl::StrCat("load kernels: ", kNoCudaKernels));
  }
  CudaSurroundings surroundings = ReadCudaSurroundings(driver, ordinals);
  Devices made;
  made.driver = std::make_shared<const CudaDriver>(driver);
  made.gpus = std::move(surroundings.gpus);
  made.warnings = std::move(surroundings.warnings);
  for (size_t i = 0; i < ordinals.size(); ++i) {
    SHARDD_ASSIGN_OR_RETURN(std::unique_ptr<CudaDevice> device, CudaDevice::Create(driver, ordinals[i], kernels));
    made.gpus[i].description = device->description();
    made.devices.push_back(std::move(device));
  }
  return made;
}

}  // namespace shardd
