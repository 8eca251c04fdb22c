// Errors, devices and contexts.

#include <atomic>
#include <cstdio>
#include <cstring>

#include "tests/fakes/cuda/calls.h"

namespace shardd::fake_cuda {
namespace {

std::atomic<CUresult (*)()> g_make_machine{nullptr};

struct ErrorText {
  CUresult result;
  const char* name;
  const char* text;
};
constexpr ErrorText kErrors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU",
     "no kernel image is available for execution on the device"},
    {CUDA_ERROR_ECC_UNCORRECTABLE, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

}  // namespace

CUresult Driver::GetErrorName(CUresult error, const char** text) {
  for (const ErrorText& known : kErrors) {
    if (known.result != error) continue;
    *text = known.name;
    return CUDA_SUCCESS;
  }
  *text = nullptr;
  return CUDA_ERROR_INVALID_VALUE;
}
CUresult Driver::GetErrorString(CUresult error, const char** text) {
  for (const ErrorText& known : kErrors) {
    if (known.result != error) continue;
    *text = known.text;
    return CUDA_SUCCESS;
  }
  *text = nullptr;
  return CUDA_ERROR_INVALID_VALUE;
}
void MakeMachineAtInit(CUresult (*make)()) { g_make_machine = make; }

CUresult Driver::Init(unsigned flags) {
  if (const auto make = g_make_machine.load(); make != nullptr && Machine::Get() == nullptr && !Machine::Inherited()) {
    if (const CUresult made = make(); made != CUDA_SUCCESS) return made;
  }
  const Call call = Enter("cuInit");
  if (call.machine == nullptr || (!call && call.result != CUDA_ERROR_NOT_INITIALIZED)) return call.result;
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (call.machine->options_.gpus == 0) return CUDA_ERROR_NO_DEVICE;
  std::lock_guard lock(call.machine->mutex_);
  call.machine->initialised_ = true;
  return CUDA_SUCCESS;
}
CUresult Driver::DriverGetVersion(int* version) {
  const Call call = Enter("cuDriverGetVersion");
  if (call.machine == nullptr) return call.result;
  *version = call.machine->options_.driver_version;
  return CUDA_SUCCESS;
}
CUresult Driver::DeviceGetCount(int* count) {
  const Call call = Enter("cuDeviceGetCount");
  if (call) *count = call.machine->options_.gpus;
  return call.result;
}
CUresult Driver::DeviceGet(CUdevice* device, int ordinal) {
  const Call call = Enter("cuDeviceGet");
  if (!call) return call.result;
  *device = ordinal;
  return HasGpu(call, ordinal) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult Driver::DeviceGetName(char* name, int length, CUdevice device) {
  const Call call = Enter("cuDeviceGetName");
  if (!call) return call.result;
  if (!HasGpu(call, device)) return CUDA_ERROR_INVALID_DEVICE;
  std::strncpy(name, "Fake GPU", static_cast<size_t>(length));
  return CUDA_SUCCESS;
}
CUresult Driver::DeviceGetUuid(CUuuid* uuid, CUdevice device) {
  const Call call = Enter("cuDeviceGetUuid");
  if (!call) return call.result;
  if (!HasGpu(call, device)) return CUDA_ERROR_INVALID_DEVICE;
  std::memset(uuid->bytes, device + 1, sizeof(uuid->bytes));
  return CUDA_SUCCESS;
}
CUresult Driver::DeviceGetPCIBusId(char* id, int length, CUdevice device) {
  const Call call = Enter("cuDeviceGetPCIBusId");
  if (!call) return call.result;
  if (!HasGpu(call, device)) return CUDA_ERROR_INVALID_DEVICE;
  std::snprintf(id, static_cast<size_t>(length), "0000:%02X:00.0", 0x40 + device);
  return CUDA_SUCCESS;
}
CUresult Driver::DeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  const Call call = Enter("cuDeviceGetAttribute");
  if (!call) return call.result;
  if (!HasGpu(call, device)) return CUDA_ERROR_INVALID_DEVICE;
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *value = 4;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE:
      *value = call.machine->options_.compute_mode;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_MPS_ENABLED:
      *value = call.machine->options_.mps;
      return *value < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
      *value = 1;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
      *value = call.machine->options_.posix_fd ? 1 : 0;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
      *value = call.machine->options_.rdma ? 1 : 0;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS:
      *value = call.machine->options_.memops ? 1 : 0;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}
CUresult Driver::DeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  const Call call = Enter("cuDeviceCanAccessPeer");
  if (!call) return call.result;
  if (!HasGpu(call, device) || !HasGpu(call, peer)) return CUDA_ERROR_INVALID_DEVICE;
  *can = device != peer && call.machine->options_.peers ? 1 : 0;
  return CUDA_SUCCESS;
}
CUresult Driver::DeviceTotalMem(size_t* size_bytes, CUdevice device) {
  const Call call = Enter("cuDeviceTotalMem");
  if (!call) return call.result;
  *size_bytes = call.machine->options_.bytes_per_gpu;
  return HasGpu(call, device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult Driver::DevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  const Call call = Enter("cuDevicePrimaryCtxRetain");
  if (!call) return call.result;
  if (!HasGpu(call, device)) return CUDA_ERROR_INVALID_DEVICE;
  std::lock_guard lock(call.machine->mutex_);
  Machine::Gpu& gpu = call.machine->gpus_[static_cast<size_t>(device)];
  if (gpu.lost != CUDA_SUCCESS) return gpu.lost;
  ++gpu.context_users;
  *context = ContextOf(device);
  return CUDA_SUCCESS;
}
CUresult Driver::DevicePrimaryCtxRelease(CUdevice device) {
  const Call call = Enter("cuDevicePrimaryCtxRelease");
  if (!call) return call.result;
  if (!HasGpu(call, device)) return CUDA_ERROR_INVALID_DEVICE;
  std::lock_guard lock(call.machine->mutex_);
  Machine::Gpu& gpu = call.machine->gpus_[static_cast<size_t>(device)];
  if (gpu.context_users == 0) return CUDA_ERROR_INVALID_CONTEXT;
  --gpu.context_users;
  return CUDA_SUCCESS;
}
std::vector<CUcontext>& Driver::Contexts(const Call& call) {
  if (ThisThread().machine != call.machine->number_)
    ThisThread() = {call.machine->number_, {}, ThisThread().in_host_function};
  return ThisThread().contexts;
}
CUresult Driver::CtxSetCurrent(CUcontext context) {
  const Call call = Enter("cuCtxSetCurrent");
  if (!call) return call.result;
  std::vector<CUcontext>& contexts = Contexts(call);
  if (contexts.empty()) contexts.push_back(nullptr);
  contexts.back() = context;
  return CUDA_SUCCESS;
}
CUresult Driver::CtxPushCurrent(CUcontext context) {
  const Call call = Enter("cuCtxPushCurrent");
  if (!call) return call.result;
  if (context == nullptr || !HasGpu(call, GpuOf(context))) return CUDA_ERROR_INVALID_CONTEXT;
  Contexts(call).push_back(context);
  return CUDA_SUCCESS;
}
CUresult Driver::CtxPopCurrent(CUcontext* context) {
  const Call call = Enter("cuCtxPopCurrent");
  if (!call) return call.result;
  std::vector<CUcontext>& contexts = Contexts(call);
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *context = contexts.back();
  contexts.pop_back();
  return CUDA_SUCCESS;
}
CUresult Driver::ModuleGetLoadingMode(CUmoduleLoadingMode* mode) {
  const Call call = Enter("cuModuleGetLoadingMode");
  if (!call) return call.result;
  *mode = call.machine->options_.eager_loading ? CU_MODULE_EAGER_LOADING : CU_MODULE_LAZY_LOADING;
  return CUDA_SUCCESS;
}
CUresult Driver::CtxGetStreamPriorityRange(int* least, int* greatest) {
  const Call call = EnterContext("cuCtxGetStreamPriorityRange");
  *least = 0;
  *greatest = -5;
  return call.result;
}

}  // namespace shardd::fake_cuda
