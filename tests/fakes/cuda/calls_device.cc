// Errors, devices and contexts.

#include <atomic>
#include <cstdio>
#include <cstring>

#include "tests/fakes/cuda/calls.h"

namespace shardd::fake_cuda {
namespace {

std::atomic<cu::Result (*)()> g_make_machine{nullptr};

struct ErrorText {
  cu::Result result;
  const char* name;
  const char* text;
};
constexpr ErrorText kErrors[] = {
    {cu::kSuccess, "CUDA_SUCCESS", "no error"},
    {cu::kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {cu::kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {cu::kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {cu::kNoDevice, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {cu::kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {cu::kInvalidImage, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {cu::kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {cu::kNoBinaryForGpu, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {cu::kEccUncorrectable, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
    {cu::kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {cu::kNotFound, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {cu::kNotReady, "CUDA_ERROR_NOT_READY", "device not ready"},
    {cu::kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {cu::kContextIsDestroyed, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {cu::kHostMemoryAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {cu::kHostMemoryNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {cu::kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {cu::kNotPermitted, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {cu::kNotSupported, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {cu::kUnknown, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

}  // namespace

cu::Result Driver::GetErrorName(cu::Result error, const char** text) {
  for (const ErrorText& known : kErrors) {
    if (known.result != error) continue;
    *text = known.name;
    return cu::kSuccess;
  }
  *text = nullptr;
  return cu::kInvalidValue;
}
cu::Result Driver::GetErrorString(cu::Result error, const char** text) {
  for (const ErrorText& known : kErrors) {
    if (known.result != error) continue;
    *text = known.text;
    return cu::kSuccess;
  }
  *text = nullptr;
  return cu::kInvalidValue;
}
void MakeMachineAtInit(cu::Result (*make)()) { g_make_machine = make; }

cu::Result Driver::Init(unsigned flags) {
  if (const auto make = g_make_machine.load(); make != nullptr && Machine::Get() == nullptr && !Machine::Inherited()) {
    if (const cu::Result made = make(); made != cu::kSuccess) return made;
  }
  const Call call = Enter("cuInit");
  if (call.machine == nullptr || (!call && call.result != cu::kNotInitialized)) return call.result;
  if (flags != 0) return cu::kInvalidValue;
  if (call.machine->options_.gpus == 0) return cu::kNoDevice;
  std::lock_guard lock(call.machine->mutex_);
  call.machine->initialised_ = true;
  return cu::kSuccess;
}
cu::Result Driver::DriverGetVersion(int* version) {
  const Call call = Enter("cuDriverGetVersion");
  if (call.machine == nullptr) return call.result;
  *version = call.machine->options_.driver_version;
  return cu::kSuccess;
}
cu::Result Driver::DeviceGetCount(int* count) {
  const Call call = Enter("cuDeviceGetCount");
  if (call) *count = call.machine->options_.gpus;
  return call.result;
}
cu::Result Driver::DeviceGet(cu::Ordinal* device, int ordinal) {
  const Call call = Enter("cuDeviceGet");
  if (!call) return call.result;
  *device = ordinal;
  return HasGpu(call, ordinal) ? cu::kSuccess : cu::kInvalidDevice;
}
cu::Result Driver::DeviceGetName(char* name, int length, cu::Ordinal device) {
  const Call call = Enter("cuDeviceGetName");
  if (!call) return call.result;
  if (!HasGpu(call, device)) return cu::kInvalidDevice;
  std::strncpy(name, "Fake GPU", static_cast<size_t>(length));
  return cu::kSuccess;
}
cu::Result Driver::DeviceGetUuid(cu::Uuid* uuid, cu::Ordinal device) {
  const Call call = Enter("cuDeviceGetUuid");
  if (!call) return call.result;
  if (!HasGpu(call, device)) return cu::kInvalidDevice;
  std::memset(uuid->bytes, device + 1, sizeof(uuid->bytes));
  return cu::kSuccess;
}
cu::Result Driver::DeviceGetPCIBusId(char* id, int length, cu::Ordinal device) {
  const Call call = Enter("cuDeviceGetPCIBusId");
  if (!call) return call.result;
  if (!HasGpu(call, device)) return cu::kInvalidDevice;
  std::snprintf(id, static_cast<size_t>(length), "0000:%02X:00.0", 0x40 + device);
  return cu::kSuccess;
}
cu::Result Driver::DeviceGetAttribute(int* value, cu::Attribute attribute, cu::Ordinal device) {
  const Call call = Enter("cuDeviceGetAttribute");
  if (!call) return call.result;
  if (!HasGpu(call, device)) return cu::kInvalidDevice;
  switch (attribute) {
    case cu::kMultiprocessorCount:
      *value = 4;
      return cu::kSuccess;
    case cu::kComputeMode:
      *value = call.machine->options_.compute_mode;
      return cu::kSuccess;
    case cu::kMpsEnabled:
      *value = call.machine->options_.mps;
      return *value < 0 ? cu::kInvalidValue : cu::kSuccess;
    case cu::kVirtualMemoryManagementSupported:
      *value = 1;
      return cu::kSuccess;
    case cu::kHandleTypePosixFdSupported:
      *value = call.machine->options_.posix_fd ? 1 : 0;
      return cu::kSuccess;
    case cu::kGpuDirectRdmaWithVmmSupported:
      *value = call.machine->options_.rdma ? 1 : 0;
      return cu::kSuccess;
    case cu::kCanUse64BitStreamMemOps:
      *value = call.machine->options_.memops ? 1 : 0;
      return cu::kSuccess;
  }
  return cu::kInvalidValue;
}
cu::Result Driver::DeviceTotalMem(size_t* size_bytes, cu::Ordinal device) {
  const Call call = Enter("cuDeviceTotalMem");
  if (!call) return call.result;
  *size_bytes = call.machine->options_.bytes_per_gpu;
  return HasGpu(call, device) ? cu::kSuccess : cu::kInvalidDevice;
}
cu::Result Driver::DevicePrimaryCtxRetain(cu::Context* context, cu::Ordinal device) {
  const Call call = Enter("cuDevicePrimaryCtxRetain");
  if (!call) return call.result;
  if (!HasGpu(call, device)) return cu::kInvalidDevice;
  std::lock_guard lock(call.machine->mutex_);
  Machine::Gpu& gpu = call.machine->gpus_[static_cast<size_t>(device)];
  if (gpu.lost != cu::kSuccess) return gpu.lost;
  ++gpu.context_users;
  *context = ContextOf(device);
  return cu::kSuccess;
}
cu::Result Driver::DevicePrimaryCtxRelease(cu::Ordinal device) {
  const Call call = Enter("cuDevicePrimaryCtxRelease");
  if (!call) return call.result;
  if (!HasGpu(call, device)) return cu::kInvalidDevice;
  std::lock_guard lock(call.machine->mutex_);
  Machine::Gpu& gpu = call.machine->gpus_[static_cast<size_t>(device)];
  if (gpu.context_users == 0) return cu::kInvalidContext;
  --gpu.context_users;
  return cu::kSuccess;
}
std::vector<cu::Context>& Driver::Contexts(const Call& call) {
  if (ThisThread().machine != call.machine->number_)
    ThisThread() = {call.machine->number_, {}, ThisThread().in_host_function};
  return ThisThread().contexts;
}
cu::Result Driver::CtxSetCurrent(cu::Context context) {
  const Call call = Enter("cuCtxSetCurrent");
  if (!call) return call.result;
  std::vector<cu::Context>& contexts = Contexts(call);
  if (contexts.empty()) contexts.push_back(nullptr);
  contexts.back() = context;
  return cu::kSuccess;
}
cu::Result Driver::CtxPushCurrent(cu::Context context) {
  const Call call = Enter("cuCtxPushCurrent");
  if (!call) return call.result;
  if (context == nullptr || !HasGpu(call, GpuOf(context))) return cu::kInvalidContext;
  Contexts(call).push_back(context);
  return cu::kSuccess;
}
cu::Result Driver::CtxPopCurrent(cu::Context* context) {
  const Call call = Enter("cuCtxPopCurrent");
  if (!call) return call.result;
  std::vector<cu::Context>& contexts = Contexts(call);
  if (contexts.empty()) return cu::kInvalidContext;
  *context = contexts.back();
  contexts.pop_back();
  return cu::kSuccess;
}
cu::Result Driver::ModuleGetLoadingMode(int* mode) {
  const Call call = Enter("cuModuleGetLoadingMode");
  if (!call) return call.result;
  *mode = call.machine->options_.eager_loading ? cu::kEagerLoading : cu::kEagerLoading + 1;
  return cu::kSuccess;
}
cu::Result Driver::CtxGetStreamPriorityRange(int* least, int* greatest) {
  const Call call = EnterContext("cuCtxGetStreamPriorityRange");
  *least = 0;
  *greatest = -5;
  return call.result;
}

}  // namespace shardd::fake_cuda
