#include "client/c/gpu/stream_context.h"

#include "common/status/status_macros.h"

namespace shardd {

absl::Status RetainRanksContext(const CudaDriver& driver, int ordinal, CUdevice* device, CUcontext* context) {
  SHARDD_RETURN_IF_ERROR(driver.Check(driver->DeviceGet(device, ordinal), "cuDeviceGet", "the rank's GPU"));
  return driver.Check(driver->DevicePrimaryCtxRetain(context, *device), "cuDevicePrimaryCtxRetain", "the rank's GPU");
}

absl::StatusOr<bool> HasStreamMemoryOperations(const CudaDriver& driver, CUdevice device) {
  int has = 0;
  SHARDD_RETURN_IF_ERROR(
      driver.Check(driver->DeviceGetAttribute(&has, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, device),
                   "cuDeviceGetAttribute", "64-bit stream memory operations"));
  return has != 0;
}

absl::StatusOr<CUstream> CreateFirstStream(const CudaDriver& driver, const char* what) {
  int least = 0, greatest = 0;
  SHARDD_RETURN_IF_ERROR(
      driver.Check(driver->CtxGetStreamPriorityRange(&least, &greatest), "cuCtxGetStreamPriorityRange", ""));
  CUstream stream = nullptr;
  SHARDD_RETURN_IF_ERROR(driver.Check(driver->StreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, greatest),
                                      "cuStreamCreateWithPriority", what));
  return stream;
}

}  // namespace shardd
