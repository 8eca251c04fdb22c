// Memory: what Memory does, for who may call.

#include "tests/fakes/cuda/calls.h"

namespace shardd::fake_cuda {

CUresult Driver::MemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  const Call call = EnterContext("cuMemGetInfo");
  if (!call) return call.result;
  *total_bytes = call.machine->options_.bytes_per_gpu;
  *free_bytes = call.machine->memory_.FreeBytes(call.gpu);
  return CUDA_SUCCESS;
}
CUresult Driver::MemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* prop,
                                             CUmemAllocationGranularity_flags option) {
  const Call call = Enter("cuMemGetAllocationGranularity");
  return call ? call.machine->memory_.Granularity(prop, option, granularity) : call.result;
}
CUresult Driver::MemCreate(CUmemGenericAllocationHandle* handle, size_t size_bytes, const CUmemAllocationProp* prop,
                           unsigned long long flags) {
  const Call call = Enter("cuMemCreate");
  if (!call) return call.result;
  return flags == 0 ? call.machine->memory_.Create(size_bytes, prop, handle) : CUDA_ERROR_INVALID_VALUE;
}
CUresult Driver::MemRelease(CUmemGenericAllocationHandle handle) {
  const Call call = Enter("cuMemRelease");
  return call ? call.machine->memory_.Release(handle) : call.result;
}
CUresult Driver::MemAddressReserve(CUdeviceptr* address, size_t size_bytes, size_t alignment, CUdeviceptr,
                                   unsigned long long flags) {
  const Call call = Enter("cuMemAddressReserve");
  if (!call) return call.result;
  return flags == 0 ? call.machine->memory_.Reserve(size_bytes, alignment, address) : CUDA_ERROR_INVALID_VALUE;
}
CUresult Driver::MemAddressFree(CUdeviceptr address, size_t size_bytes) {
  const Call call = Enter("cuMemAddressFree");
  return call ? call.machine->memory_.Free(address, size_bytes) : call.result;
}
CUresult Driver::MemMap(CUdeviceptr address, size_t size_bytes, size_t offset, CUmemGenericAllocationHandle handle,
                        unsigned long long flags) {
  const Call call = Enter("cuMemMap");
  if (!call) return call.result;
  return flags == 0 ? call.machine->memory_.Map(address, size_bytes, offset, handle) : CUDA_ERROR_INVALID_VALUE;
}
CUresult Driver::MemUnmap(CUdeviceptr address, size_t size_bytes) {
  const Call call = Enter("cuMemUnmap");
  if (call) call.machine->AwaitUnmapping();
  return call ? call.machine->memory_.Unmap(address, size_bytes) : call.result;
}
CUresult Driver::MemSetAccess(CUdeviceptr address, size_t size_bytes, const CUmemAccessDesc* descs, size_t count) {
  const Call call = Enter("cuMemSetAccess");
  return call ? call.machine->memory_.SetAccess(address, size_bytes, descs, count) : call.result;
}
CUresult Driver::MemExportToShareableHandle(void* shareable, CUmemGenericAllocationHandle handle,
                                            CUmemAllocationHandleType handle_type, unsigned long long flags) {
  const Call call = Enter("cuMemExportToShareableHandle");
  if (!call) return call.result;
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return call.machine->memory_.Export(handle, handle_type, static_cast<int*>(shareable));
}
CUresult Driver::MemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* os_handle,
                                              CUmemAllocationHandleType handle_type) {
  const Call call = Enter("cuMemImportFromShareableHandle");
  if (!call) return call.result;
  return call.machine->memory_.Import(static_cast<int>(reinterpret_cast<intptr_t>(os_handle)), handle_type, handle);
}
CUresult Driver::MemHostRegister(void* p, size_t size_bytes, unsigned flags) {
  const Call call = EnterContext("cuMemHostRegister");
  return call ? call.machine->memory_.HostRegister(p, size_bytes, flags) : call.result;
}
CUresult Driver::MemHostUnregister(void* p) {
  const Call call = EnterContext("cuMemHostUnregister");
  return call ? call.machine->memory_.HostUnregister(p) : call.result;
}
CUresult Driver::MemHostGetDevicePointer(CUdeviceptr* address, void* p, unsigned) {
  const Call call = EnterContext("cuMemHostGetDevicePointer");
  return call ? call.machine->memory_.HostDevicePointer(p, address) : call.result;
}

}  // namespace shardd::fake_cuda
