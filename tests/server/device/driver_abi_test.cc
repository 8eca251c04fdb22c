// That the driver's API is declared as the toolkit declares it: sizes, numbers and the types of every function.

#include <gtest/gtest.h>

#include <cstddef>
#include <type_traits>

#include "common/cuda/driver_api.h"

#if __has_include(<cuda.h>)
#include <cuda.h>

namespace shardd {
namespace {

static_assert(cu::kSuccess == CUDA_SUCCESS && cu::kInvalidValue == CUDA_ERROR_INVALID_VALUE);
static_assert(cu::kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY && cu::kNotInitialized == CUDA_ERROR_NOT_INITIALIZED);
static_assert(cu::kDeinitialized == CUDA_ERROR_DEINITIALIZED &&
              cu::kDeviceUnavailable == CUDA_ERROR_DEVICE_UNAVAILABLE);
static_assert(cu::kNoDevice == CUDA_ERROR_NO_DEVICE && cu::kInvalidDevice == CUDA_ERROR_INVALID_DEVICE);
static_assert(cu::kInvalidImage == CUDA_ERROR_INVALID_IMAGE && cu::kInvalidContext == CUDA_ERROR_INVALID_CONTEXT);
static_assert(cu::kNoBinaryForGpu == CUDA_ERROR_NO_BINARY_FOR_GPU &&
              cu::kEccUncorrectable == CUDA_ERROR_ECC_UNCORRECTABLE);
static_assert(cu::kNvlinkUncorrectable == CUDA_ERROR_NVLINK_UNCORRECTABLE && cu::kContained == CUDA_ERROR_CONTAINED);
static_assert(cu::kInvalidHandle == CUDA_ERROR_INVALID_HANDLE && cu::kNotFound == CUDA_ERROR_NOT_FOUND);
static_assert(cu::kNotReady == CUDA_ERROR_NOT_READY && cu::kIllegalAddress == CUDA_ERROR_ILLEGAL_ADDRESS);
static_assert(cu::kLaunchTimeout == CUDA_ERROR_LAUNCH_TIMEOUT);
static_assert(cu::kContextIsDestroyed == CUDA_ERROR_CONTEXT_IS_DESTROYED && cu::kAssert == CUDA_ERROR_ASSERT);
static_assert(cu::kHostMemoryAlreadyRegistered == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
static_assert(cu::kHostMemoryNotRegistered == CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
static_assert(714 == CUDA_ERROR_HARDWARE_STACK_ERROR && cu::kLaunchFailed == CUDA_ERROR_LAUNCH_FAILED);
static_assert(cu::kNotPermitted == CUDA_ERROR_NOT_PERMITTED && cu::kNotSupported == CUDA_ERROR_NOT_SUPPORTED);
static_assert(cu::kMpsConnectionFailed == CUDA_ERROR_MPS_CONNECTION_FAILED);
static_assert(cu::kMpsClientTerminated == CUDA_ERROR_MPS_CLIENT_TERMINATED);
static_assert(cu::kExternalDevice == CUDA_ERROR_EXTERNAL_DEVICE && cu::kUnknown == CUDA_ERROR_UNKNOWN);

static_assert(int{cu::kMultiprocessorCount} == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
static_assert(int{cu::kComputeMode} == CU_DEVICE_ATTRIBUTE_COMPUTE_MODE);
static_assert(cu::kComputeModeDefault == CU_COMPUTEMODE_DEFAULT &&
              cu::kComputeModeProhibited == CU_COMPUTEMODE_PROHIBITED &&
              cu::kComputeModeExclusiveProcess == CU_COMPUTEMODE_EXCLUSIVE_PROCESS);
#if CUDA_VERSION >= 13000  // the first toolkit that was looked at and has it
static_assert(int{cu::kMpsEnabled} == CU_DEVICE_ATTRIBUTE_MPS_ENABLED);
#endif
static_assert(cu::kEagerLoading == CU_MODULE_EAGER_LOADING && sizeof(CUmoduleLoadingMode) == sizeof(int));
static_assert(int{cu::kVirtualMemoryManagementSupported} == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
static_assert(int{cu::kHandleTypePosixFdSupported} == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
static_assert(int{cu::kGpuDirectRdmaWithVmmSupported} == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
static_assert(int{cu::kCanUse64BitStreamMemOps} == CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS);
static_assert(cu::kLocationDevice == CU_MEM_LOCATION_TYPE_DEVICE);
static_assert(cu::kAllocationPinned == CU_MEM_ALLOCATION_TYPE_PINNED);
static_assert(cu::kHandlePosixFd == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
static_assert(cu::kGranularityRecommended == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
static_assert(cu::kAccessRead == CU_MEM_ACCESS_FLAGS_PROT_READ);
static_assert(cu::kAccessReadWrite == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
static_assert(cu::kStreamNonBlocking == CU_STREAM_NON_BLOCKING && cu::kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(cu::kHostRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(cu::kHostRegisterDeviceMap == CU_MEMHOSTREGISTER_DEVICEMAP);
static_assert(cu::kWaitValueGeq == CU_STREAM_WAIT_VALUE_GEQ && cu::kWaitValueEq == CU_STREAM_WAIT_VALUE_EQ);
static_assert(cu::kWriteValueDefault == CU_STREAM_WRITE_VALUE_DEFAULT);
static_assert(cu::kCaptureNone == CU_STREAM_CAPTURE_STATUS_NONE &&
              cu::kCaptureActive == CU_STREAM_CAPTURE_STATUS_ACTIVE &&
              cu::kCaptureModeThreadLocal == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
static_assert(cu::kStreamCaptureUnsupported == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED &&
              cu::kStreamCaptureInvalidated == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

static_assert(sizeof(CUresult) == sizeof(cu::Result) && sizeof(CUuuid) == sizeof(cu::Uuid));
static_assert(sizeof(CUmemAllocationProp) == sizeof(cu::MemAllocationProp));
static_assert(offsetof(CUmemAllocationProp, location) == offsetof(cu::MemAllocationProp, location));
static_assert(offsetof(CUmemAllocationProp, win32HandleMetaData) ==
              offsetof(cu::MemAllocationProp, win32_handle_meta_data));
static_assert(offsetof(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable) ==
              offsetof(cu::MemAllocationProp, alloc_flags.gpu_direct_rdma_capable));
static_assert(sizeof(CUmemAccessDesc) == sizeof(cu::MemAccessDesc));
static_assert(offsetof(CUmemAccessDesc, flags) == offsetof(cu::MemAccessDesc, flags));

// A parameter is passed alike: both pointers, or numbers of one size.
template <typename Ours, typename Theirs>
constexpr bool kAlike = std::is_pointer_v<Ours> == std::is_pointer_v<Theirs> && sizeof(Ours) == sizeof(Theirs);
template <typename Ours, typename Theirs>
struct SameSignature : std::false_type {};
template <typename R, typename... Ours, typename S, typename... Theirs>
struct SameSignature<R (*)(Ours...), S (*)(Theirs...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(Ours) == sizeof...(Theirs)) {
      return (kAlike<Ours, Theirs> && ...);
    } else {
      return false;
    }
  }();
};
// Through the macros of cuda.h, which say what the current ABI of each name is.
#define SHARDD_CU_COMPARE(name, parameters) \
  static_assert(SameSignature<decltype(cu::DriverTable::name), decltype(&cu##name)>::value, #name);
SHARDD_CU_FUNCTIONS(SHARDD_CU_COMPARE)
#undef SHARDD_CU_COMPARE

TEST(DriverAbiTest, IsThatOfTheToolkit) { EXPECT_GE(CUDA_VERSION, cu::kApiVersion); }

}  // namespace
}  // namespace shardd

#else
TEST(DriverAbiTest, IsThatOfTheToolkit) { GTEST_SKIP() << "cuda.h is not there to compare with"; }
#endif
