#include "common/cuda/driver.h"

#include <dlfcn.h>

#include <type_traits>

#include "absl/strings/str_cat.h"

namespace shardd {
namespace {

using GetProcAddress = PFN_cuGetProcAddress_v12000;

absl::Status NoDriver(absl::string_view library, absl::string_view fact) {
  return absl::FailedPreconditionError(absl::StrCat("load CUDA driver \"", library, "\": ", fact));
}

const char* LoaderError() {
  const char* text = dlerror();
  return text == nullptr ? "no reason given" : text;
}

}  // namespace

ScopedCudaContext::ScopedCudaContext(const CudaDriver& driver, CUcontext context)
    : driver_(driver), result_(driver->CtxPushCurrent(context)) {}

ScopedCudaContext::~ScopedCudaContext() {
  CUcontext popped;
  if (result_ == CUDA_SUCCESS) (void)driver_->CtxPopCurrent(&popped);
}

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
  const auto resolve = [&](const char* name, int version, auto* function) {
    void* address = nullptr;
    if (get(name, &address, version, CU_GET_PROC_ADDRESS_DEFAULT, nullptr) != CUDA_SUCCESS || address == nullptr) {
      absl::StrAppend(&missing, missing.empty() ? "" : ", ", name);
      return;
    }
    *function = reinterpret_cast<std::remove_reference_t<decltype(*function)>>(address);
  };
#define SHARDD_CU_RESOLVE(name, version) resolve("cu" #name, version, &table.name);
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
  if (driver->DriverGetVersion(&version) != CUDA_SUCCESS || version < cu::kApiVersion) {
    return NoDriver(library, absl::StrCat("it is too old (got CUDA ", version / 1000, ".", version % 1000 / 10,
                                          ", want 12.0 or later)"));
  }
  return driver;
}

absl::StatusOr<int> CudaDriver::CountDevices() const {
  int count = 0;
  const absl::Status status = Check(table_.DeviceGetCount(&count), "cuDeviceGetCount", "");
  return status.ok() ? absl::StatusOr<int>(count) : status;
}

bool CudaDriver::IsLost(CUresult result) {
  switch (result) {
    case CUDA_ERROR_DEINITIALIZED:
    case CUDA_ERROR_DEVICE_UNAVAILABLE:
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_CONTAINED:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_EXTERNAL_DEVICE:
    case CUDA_ERROR_UNKNOWN:
      return true;
    default:
      // From "hardware stack error" to "launch failed" (illegal instruction, misaligned address, ...), and what MPS
      // reports after the death of its server or of another client of the GPU.
      return (result >= 714 && result <= CUDA_ERROR_LAUNCH_FAILED) ||
             (result >= CUDA_ERROR_MPS_CONNECTION_FAILED && result <= CUDA_ERROR_MPS_CLIENT_TERMINATED);
  }
}

absl::Status CudaDriver::Check(CUresult result, absl::string_view operation, absl::string_view object,
                               absl::string_view device) const {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  const char* name = nullptr;
  const char* text = nullptr;
  if (table_.GetErrorName(result, &name) != CUDA_SUCCESS || name == nullptr) name = "unnamed error";
  if (table_.GetErrorString(result, &text) != CUDA_SUCCESS || text == nullptr) text = "no text";
  std::string message =
      absl::StrCat(operation, object.empty() ? "" : " ", object, ": ", name, ": ", text, " (result ", result);
  if (!device.empty()) absl::StrAppend(&message, ", device=", device);
  message += ")";
  if (IsLost(result)) return absl::DataLossError(message);
  switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY:
      return absl::ResourceExhaustedError(message);
    case CUDA_ERROR_NOT_SUPPORTED:
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
      return absl::UnimplementedError(message);
    case CUDA_ERROR_NO_DEVICE:
    case CUDA_ERROR_INVALID_DEVICE:
      return absl::FailedPreconditionError(message);
    default:
      return absl::InternalError(message);
  }
}

}  // namespace shardd
