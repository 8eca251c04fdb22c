#ifndef SHARDD_COMMON_CUDA_DRIVER_API_H_
#define SHARDD_COMMON_CUDA_DRIVER_API_H_

// The part of NVIDIA's driver API that shardd uses. It is declared here instead of taken from cuda.h, so that every
// build has the CUDA device, on machines without the toolkit too, and tests run everywhere on a fake driver. The ABI is
// that of CUDA 12.0, unchanged since; tests/server/device/driver_abi_test.cc compares it with cuda.h if there is one.
// NVIDIA documents each function under `cu` + its name here.

#include <cstddef>
#include <cstdint>

namespace shardd::cu {

inline constexpr int kApiVersion = 12000;  // as cuDriverGetVersion counts: 1000 * major + 10 * minor

using Result = int;  // an enum of that size
inline constexpr Result kSuccess = 0;
inline constexpr Result kInvalidValue = 1;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kNotInitialized = 3;
inline constexpr Result kDeinitialized = 4;
inline constexpr Result kDeviceUnavailable = 46;
inline constexpr Result kNoDevice = 100;
inline constexpr Result kInvalidDevice = 101;
inline constexpr Result kInvalidImage = 200;
inline constexpr Result kInvalidContext = 201;
inline constexpr Result kNoBinaryForGpu = 209;
inline constexpr Result kEccUncorrectable = 214;
inline constexpr Result kNvlinkUncorrectable = 220;
inline constexpr Result kContained = 226;
inline constexpr Result kInvalidHandle = 400;
inline constexpr Result kNotFound = 500;
inline constexpr Result kNotReady = 600;
inline constexpr Result kIllegalAddress = 700;
inline constexpr Result kLaunchTimeout = 702;
inline constexpr Result kContextIsDestroyed = 709;
inline constexpr Result kAssert = 710;
inline constexpr Result kHostMemoryAlreadyRegistered = 712;
inline constexpr Result kHostMemoryNotRegistered = 713;
inline constexpr Result kLaunchFailed = 719;
inline constexpr Result kNotPermitted = 800;
inline constexpr Result kNotSupported = 801;
inline constexpr Result kMpsConnectionFailed = 805;
inline constexpr Result kMpsClientTerminated = 810;
inline constexpr Result kStreamCaptureUnsupported = 900;
inline constexpr Result kStreamCaptureInvalidated = 901;
inline constexpr Result kExternalDevice = 911;
inline constexpr Result kUnknown = 999;

using Ordinal = int;                   // CUdevice
using DevicePtr = unsigned long long;  // CUdeviceptr
using MemHandle = unsigned long long;  // CUmemGenericAllocationHandle
using Context = struct ContextOpaque*;
using Stream = struct StreamOpaque*;
using Event = struct EventOpaque*;
using Library = struct LibraryOpaque*;
using Kernel = struct KernelOpaque*;  // CUkernel: of a library, in any context; LaunchKernel takes it for a CUfunction
using Graph = struct GraphOpaque*;
using GraphExec = struct GraphExecOpaque*;
using HostFunction = void (*)(void* user_data);

enum Attribute : int {
  kMultiprocessorCount = 16,
  kComputeMode = 20,
  kVirtualMemoryManagementSupported = 102,
  kHandleTypePosixFdSupported = 103,
  kGpuDirectRdmaWithVmmSupported = 110,
  kCanUse64BitStreamMemOps = 122,
  kMpsEnabled = 133,  // drivers of CUDA 12.0 do not know it: kInvalidValue
};

inline constexpr int kComputeModeDefault = 0;
inline constexpr int kComputeModeProhibited = 2;
inline constexpr int kComputeModeExclusiveProcess = 3;
inline constexpr int kEagerLoading = 1;

struct Uuid {
  unsigned char bytes[16];
};
struct MemLocation {
  int type;
  int id;
};
inline constexpr int kLocationDevice = 1;
struct MemAllocationProp {
  int type;
  int requested_handle_types;
  MemLocation location;
  void* win32_handle_meta_data;
  struct {
    unsigned char compression_type;
    unsigned char gpu_direct_rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
  } alloc_flags;
};
inline constexpr int kAllocationPinned = 1;
inline constexpr int kHandlePosixFd = 1;
inline constexpr int kGranularityRecommended = 1;
struct MemAccessDesc {
  MemLocation location;
  int flags;
};
inline constexpr int kAccessRead = 1;
inline constexpr int kAccessReadWrite = 3;

inline constexpr unsigned kStreamNonBlocking = 1;
// Handles of streams that nobody creates: the context's legacy default stream (which null names too), and the default
// stream of the calling thread.
inline const Stream kStreamLegacy = reinterpret_cast<Stream>(uintptr_t{1});
inline const Stream kStreamPerThread = reinterpret_cast<Stream>(uintptr_t{2});
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kHostRegisterPortable = 1;
inline constexpr unsigned kHostRegisterDeviceMap = 2;
// Waits until *addr - value >= 0 as a signed 64-bit difference, so a value more than 2^63 ahead counts as behind.
inline constexpr unsigned kWaitValueGeq = 0;
inline constexpr unsigned kWaitValueEq = 1;
inline constexpr unsigned kWriteValueDefault = 0;  // with a memory barrier before the write
inline constexpr int kCaptureNone = 0;             // CUstreamCaptureStatus
inline constexpr int kCaptureActive = 1;
inline constexpr int kCaptureModeThreadLocal = 1;

// A driver that runs kernels without a GPU exports an object of this type under this name, in place of the fat binary,
// for builds without nvcc. NVIDIA's library has no such symbol.
struct DriverKernels {
  const unsigned char* data;
  size_t size_bytes;
};
inline constexpr char kDriverKernelsSymbol[] = "shardd_driver_kernels";

// X(name, (parameters)): every function returns cu::Result.
#define SHARDD_CU_FUNCTIONS(X)                                                                                         \
  X(GetErrorName, (cu::Result error, const char** text))                                                               \
  X(GetErrorString, (cu::Result error, const char** text))                                                             \
  X(Init, (unsigned flags))                                                                                            \
  X(DriverGetVersion, (int* version))                                                                                  \
  X(DeviceGetCount, (int* count))                                                                                      \
  X(DeviceGet, (cu::Ordinal * device, int ordinal))                                                                    \
  X(DeviceGetName, (char* name, int length, cu::Ordinal device))                                                       \
  X(DeviceGetUuid, (cu::Uuid * uuid, cu::Ordinal device))                                                              \
  X(DeviceGetPCIBusId, (char* id, int length, cu::Ordinal device))                                                     \
  X(DeviceGetAttribute, (int* value, cu::Attribute attribute, cu::Ordinal device))                                     \
  X(DeviceTotalMem, (size_t * size_bytes, cu::Ordinal device))                                                         \
  X(DevicePrimaryCtxRetain, (cu::Context * context, cu::Ordinal device))                                               \
  X(DevicePrimaryCtxRelease, (cu::Ordinal device))                                                                     \
  X(CtxSetCurrent, (cu::Context context))                                                                              \
  X(CtxPushCurrent, (cu::Context context))                                                                             \
  X(CtxPopCurrent, (cu::Context * context))                                                                            \
  X(CtxGetStreamPriorityRange, (int* least, int* greatest))                                                            \
  X(ModuleGetLoadingMode, (int* mode))                                                                                 \
  X(MemGetInfo, (size_t * free_bytes, size_t * total_bytes))                                                           \
  X(MemGetAllocationGranularity, (size_t * granularity, const cu::MemAllocationProp* prop, int option))                \
  X(MemCreate,                                                                                                         \
    (cu::MemHandle * handle, size_t size_bytes, const cu::MemAllocationProp* prop, unsigned long long flags))          \
  X(MemRelease, (cu::MemHandle handle))                                                                                \
  X(MemAddressReserve,                                                                                                 \
    (cu::DevicePtr * address, size_t size_bytes, size_t alignment, cu::DevicePtr hint, unsigned long long flags))      \
  X(MemAddressFree, (cu::DevicePtr address, size_t size_bytes))                                                        \
  X(MemMap, (cu::DevicePtr address, size_t size_bytes, size_t offset, cu::MemHandle handle, unsigned long long flags)) \
  X(MemUnmap, (cu::DevicePtr address, size_t size_bytes))                                                              \
  X(MemSetAccess, (cu::DevicePtr address, size_t size_bytes, const cu::MemAccessDesc* descs, size_t count))            \
  X(MemExportToShareableHandle, (void* shareable, cu::MemHandle handle, int handle_type, unsigned long long flags))    \
  X(MemImportFromShareableHandle, (cu::MemHandle * handle, void* os_handle, int handle_type))                          \
  X(MemHostRegister, (void* p, size_t size_bytes, unsigned flags))                                                     \
  X(MemHostUnregister, (void* p))                                                                                      \
  X(MemHostGetDevicePointer, (cu::DevicePtr * address, void* p, unsigned flags))                                       \
  X(StreamCreateWithPriority, (cu::Stream * stream, unsigned flags, int priority))                                     \
  X(StreamDestroy, (cu::Stream stream))                                                                                \
  X(StreamQuery, (cu::Stream stream))                                                                                  \
  X(StreamSynchronize, (cu::Stream stream))                                                                            \
  X(StreamWaitEvent, (cu::Stream stream, cu::Event event, unsigned flags))                                             \
  X(StreamWriteValue64, (cu::Stream stream, cu::DevicePtr address, uint64_t value, unsigned flags))                    \
  X(StreamWaitValue64, (cu::Stream stream, cu::DevicePtr address, uint64_t value, unsigned flags))                     \
  X(StreamIsCapturing, (cu::Stream stream, int* status))                                                               \
  X(StreamBeginCapture, (cu::Stream stream, int mode))                                                                 \
  X(StreamEndCapture, (cu::Stream stream, cu::Graph * graph))                                                          \
  X(GraphInstantiateWithFlags, (cu::GraphExec * exec, cu::Graph graph, unsigned long long flags))                      \
  X(GraphLaunch, (cu::GraphExec exec, cu::Stream stream))                                                              \
  X(GraphExecDestroy, (cu::GraphExec exec))                                                                            \
  X(GraphDestroy, (cu::Graph graph))                                                                                   \
  X(EventCreate, (cu::Event * event, unsigned flags))                                                                  \
  X(EventDestroy, (cu::Event event))                                                                                   \
  X(EventRecord, (cu::Event event, cu::Stream stream))                                                                 \
  X(EventQuery, (cu::Event event))                                                                                     \
  X(EventSynchronize, (cu::Event event))                                                                               \
  X(MemcpyAsync, (cu::DevicePtr dst, cu::DevicePtr src, size_t size_bytes, cu::Stream stream))                         \
  X(MemsetD8Async, (cu::DevicePtr dst, unsigned char value, size_t size_bytes, cu::Stream stream))                     \
  X(LaunchHostFunc, (cu::Stream stream, cu::HostFunction function, void* user_data))                                   \
  X(LibraryLoadData, (cu::Library * library, const void* code, int* jit_options, void** jit_values,                    \
                      unsigned jit_count, int* library_options, void** library_values, unsigned library_count))        \
  X(LibraryUnload, (cu::Library library))                                                                              \
  X(LibraryGetKernel, (cu::Kernel * kernel, cu::Library library, const char* name))                                    \
  X(LaunchKernel,                                                                                                      \
    (cu::Kernel kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,         \
     unsigned block_z, unsigned shared_bytes, cu::Stream stream, void** params, void** extra))

// One pointer per function, of the machine's driver (driver.h) or of a fake (tests/fakes/cuda).
struct DriverTable {
#define SHARDD_CU_MEMBER(name, parameters) Result(*name) parameters = nullptr;
  SHARDD_CU_FUNCTIONS(SHARDD_CU_MEMBER)
#undef SHARDD_CU_MEMBER
};

}  // namespace shardd::cu

#endif  // SHARDD_COMMON_CUDA_DRIVER_API_H_
