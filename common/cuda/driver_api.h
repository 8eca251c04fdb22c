#ifndef SHARDD_COMMON_CUDA_DRIVER_API_H_
#define SHARDD_COMMON_CUDA_DRIVER_API_H_

// Which functions of NVIDIA's driver shardd calls: types, constants and signatures are those of cuda.h, the functions
// are found at run time (driver.h), so nothing of CUDA is linked, and tests run everywhere on a fake driver that is
// compiled against the same header (tests/fakes/cuda). Reading it costs a compiler 50 ms: headers that reach many files
// do not include this one.
//
// A build without NVIDIA's headers (SHARDD_NO_GPUS; deploy/cmake/nvidia.cmake) has the handles' names, so that classes
// which have such members can be declared, and nothing that could be done with them.

#include <cstddef>
#include <cstdint>

#ifdef SHARDD_NO_GPUS
using CUcontext = struct CUctx_st*;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUevent = struct CUevent_st*;
using CUgraphExec = struct CUgraphExec_st*;
using CUkernel = struct CUkern_st*;
using CUresult = int;
using CUstream = struct CUstream_st*;
using CUmemAccessDesc = struct CUmemAccessDesc_st;
using CUmemAllocationProp = struct CUmemAllocationProp_st;
using CUmemGenericAllocationHandle = unsigned long long;
#else
#include <cuda.h>
#include <cudaTypedefs.h>
#endif

namespace shardd::cu {

inline constexpr int kApiVersion = 12000;  // the oldest driver, as cuDriverGetVersion counts: 1000 * major + 10 * minor

// A driver that runs kernels without a GPU exports an object of this type under this name, in place of the fat binary,
// for builds without nvcc. NVIDIA's library has no such symbol.
struct DriverKernels {
  const unsigned char* data;
  size_t size_bytes;
};
inline constexpr char kDriverKernelsSymbol[] = "shardd_driver_kernels";

// X(name, version): function `cu` + name as that version of CUDA introduced it, which every driver since has, whatever
// newer meaning cuda.h gives the plain name. The driver is asked for exactly this version, of the type that
// cudaTypedefs.h has for it. A version is the latest up to kApiVersion.
// clang-format off
#define SHARDD_CU_FUNCTIONS(X)                                                             \
  X(GetErrorName, 6000) X(GetErrorString, 6000) X(Init, 2000) X(DriverGetVersion, 2020)    \
  X(DeviceGetCount, 2000) X(DeviceGet, 2000) X(DeviceGetName, 2000)                        \
  X(DeviceGetUuid, 11040) X(DeviceGetPCIBusId, 4010) X(DeviceGetAttribute, 2000)           \
  X(DeviceTotalMem, 3020) X(DeviceCanAccessPeer, 4000) X(DevicePrimaryCtxRetain, 7000)     \
  X(DevicePrimaryCtxRelease, 11000) X(CtxSetCurrent, 4000) X(CtxPushCurrent, 4000)         \
  X(CtxPopCurrent, 4000) X(CtxGetStreamPriorityRange, 5050) X(ModuleGetLoadingMode, 11070) \
  X(MemGetInfo, 3020) X(MemGetAllocationGranularity, 10020) X(MemCreate, 10020)            \
  X(MemRelease, 10020) X(MemAddressReserve, 10020) X(MemAddressFree, 10020)                \
  X(MemMap, 10020) X(MemUnmap, 10020) X(MemSetAccess, 10020)                               \
  X(MemExportToShareableHandle, 10020) X(MemImportFromShareableHandle, 10020)              \
  X(MemHostRegister, 6050) X(MemHostUnregister, 4000) X(MemHostGetDevicePointer, 3020)     \
  X(StreamCreateWithPriority, 5050) X(StreamDestroy, 4000) X(StreamQuery, 2000)            \
  X(StreamSynchronize, 2000) X(StreamWaitEvent, 3020) X(StreamWriteValue64, 11070)         \
  X(StreamWaitValue64, 11070) X(StreamIsCapturing, 10000) X(StreamBeginCapture, 10010)     \
  X(StreamEndCapture, 10000) X(GraphInstantiateWithFlags, 11040) X(GraphLaunch, 10000)     \
  X(GraphExecDestroy, 10000) X(GraphDestroy, 10000) X(EventCreate, 2000)                   \
  X(EventDestroy, 4000) X(EventRecord, 2000) X(EventQuery, 2000) X(EventSynchronize, 2000) \
  X(MemcpyAsync, 4000) X(MemsetD8Async, 3020) X(LaunchHostFunc, 10000)                     \
  X(LibraryLoadData, 12000) X(LibraryUnload, 12000) X(LibraryGetKernel, 12000)             \
  X(LaunchKernel, 4000)
// clang-format on

// One pointer per function, of the machine's driver (driver.h) or of a fake (tests/fakes/cuda).
struct DriverTable {
#ifndef SHARDD_NO_GPUS
#define SHARDD_CU_MEMBER(name, version) PFN_cu##name##_v##version name = nullptr;
  SHARDD_CU_FUNCTIONS(SHARDD_CU_MEMBER)
#undef SHARDD_CU_MEMBER
#endif
};

#ifndef SHARDD_NO_GPUS
// A library's kernel as LaunchKernel takes it, in any context: cuda.h has the cast for it, and no type.
inline CUfunction FunctionOf(CUkernel kernel) { return reinterpret_cast<CUfunction>(kernel); }
#endif

}  // namespace shardd::cu

#endif  // SHARDD_COMMON_CUDA_DRIVER_API_H_
