#include "common/cuda/driver.h"

#include <dlfcn.h>

#include <type_traits>

#include "absl/strings/str_cat.h"

namespace shardd {
namespace {

using GetProcAddress = cu::Result (*)(const char* name, void** function, int version, uint64_t flags, int* query);

absl::Status NoDriver(absl::string_view library, absl::string_view fact) {
  return absl::FailedPreconditionError(absl::StrCat("load CUDA driver \"", library, "\": ", fact));
}

const char* LoaderError() {
  const char* text = dlerror();
  return text == nullptr ? "no reason given" : text;
}

}  // namespace

absl::StatusOr<CudaDriver> CudaDriver::Load(const std::string& library) {
  // Never closed: the driver has threads and handlers of its own.
  void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    return NoDriver(library, absl::StrCat("no such library: this machine has no NVIDIA driver, or it is not visible "
                                          "here (",
                                          LoaderError(), ")"));
  }
  const auto get = reinterpret_cast<GetProcAddress>(dlsym(handle, "cuGetProcAddress_v2"));
  if (get == nullptr) {
    return NoDriver(library, absl::StrCat("older than CUDA 12.0, or no CUDA driver (", LoaderError(), ")"));
  }
  cu::DriverTable table;
  std::string missing;
  const auto resolve = [&](const char* name, auto* function) {
    void* address = nullptr;
    if (get(name, &address, cu::kApiVersion, 0, nullptr) != cu::kSuccess || address == nullptr) {
      absl::StrAppend(&missing, missing.empty() ? "" : ", ", name);
      return;
    }
    *function = reinterpret_cast<std::remove_reference_t<decltype(*function)>>(address);
  };
#define SHARDD_CU_RESOLVE(name, parameters) resolve("cu" #name, &table.name);
  SHARDD_CU_FUNCTIONS(SHARDD_CU_RESOLVE)
#undef SHARDD_CU_RESOLVE
  if (!missing.empty()) return NoDriver(library, absl::StrCat("it has no ", missing));
  CudaDriver driver(table);
  if (const void* const own = dlsym(handle, cu::kDriverKernelsSymbol); own != nullptr) {
    const auto* const image = static_cast<const cu::DriverKernels*>(own);
    driver.kernels_ = absl::MakeConstSpan(image->data, image->size_bytes);
  }
  if (const absl::Status status = driver.Check(driver->Init(0), "cuInit", library); !status.ok()) {
    return NoDriver(library, absl::StrCat("it finds no usable GPU: ", status.message()));
  }
  int version = 0;
  if (driver->DriverGetVersion(&version) != cu::kSuccess || version < cu::kApiVersion) {
    return NoDriver(library, absl::StrCat("it is too old (got CUDA ", version / 1000, ".", version % 1000 / 10,
                                          ", want 12.0 or later)"));
  }
  return driver;
}

bool CudaDriver::IsLost(cu::Result result) {
  switch (result) {
    case cu::kDeinitialized:
    case cu::kDeviceUnavailable:
    case cu::kEccUncorrectable:
    case cu::kNvlinkUncorrectable:
    case cu::kContained:
    case cu::kIllegalAddress:
    case cu::kLaunchTimeout:
    case cu::kContextIsDestroyed:
    case cu::kAssert:
    case cu::kExternalDevice:
    case cu::kUnknown:
      return true;
    default:
      // From "hardware stack error" to "launch failed" (illegal instruction, misaligned address, ...), and what MPS
      // reports after the death of its server or of another client of the GPU.
      return (result >= 714 && result <= cu::kLaunchFailed) ||
             (result >= cu::kMpsConnectionFailed && result <= cu::kMpsClientTerminated);
  }
}

absl::Status CudaDriver::Check(cu::Result result, absl::string_view operation, absl::string_view object,
                               absl::string_view device) const {
  if (result == cu::kSuccess) return absl::OkStatus();
  const char* name = nullptr;
  const char* text = nullptr;
  if (table_.GetErrorName(result, &name) != cu::kSuccess || name == nullptr) name = "unnamed error";
  if (table_.GetErrorString(result, &text) != cu::kSuccess || text == nullptr) text = "no text";
  std::string message =
      absl::StrCat(operation, object.empty() ? "" : " ", object, ": ", name, ": ", text, " (result ", result);
  if (!device.empty()) absl::StrAppend(&message, ", device=", device);
  message += ")";
  if (IsLost(result)) return absl::DataLossError(message);
  switch (result) {
    case cu::kOutOfMemory:
      return absl::ResourceExhaustedError(message);
    case cu::kNotSupported:
    case cu::kNoBinaryForGpu:
      return absl::UnimplementedError(message);
    case cu::kNoDevice:
    case cu::kInvalidDevice:
      return absl::FailedPreconditionError(message);
    default:
      return absl::InternalError(message);
  }
}

}  // namespace shardd
