// Memory: what Memory does, for who may call.

#include "tests/fakes/cuda/calls.h"

namespace shardd::fake_cuda {

cu::Result Driver::MemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  const Call call = EnterContext("cuMemGetInfo");
  if (!call) return call.result;
  *total_bytes = call.machine->options_.bytes_per_gpu;
  *free_bytes = call.machine->memory_.FreeBytes(call.gpu);
  return cu::kSuccess;
}
cu::Result Driver::MemGetAllocationGranularity(size_t* granularity, const cu::MemAllocationProp* prop, int option) {
  const Call call = Enter("cuMemGetAllocationGranularity");
  return call ? call.machine->memory_.Granularity(prop, option, granularity) : call.result;
}
cu::Result Driver::MemCreate(cu::MemHandle* handle, size_t size_bytes, const cu::MemAllocationProp* prop,
                             unsigned long long flags) {
  const Call call = Enter("cuMemCreate");
  if (!call) return call.result;
  return flags == 0 ? call.machine->memory_.Create(size_bytes, prop, handle) : cu::kInvalidValue;
}
cu::Result Driver::MemRelease(cu::MemHandle handle) {
  const Call call = Enter("cuMemRelease");
  return call ? call.machine->memory_.Release(handle) : call.result;
}
cu::Result Driver::MemAddressReserve(cu::DevicePtr* address, size_t size_bytes, size_t alignment, cu::DevicePtr,
                                     unsigned long long flags) {
  const Call call = Enter("cuMemAddressReserve");
  if (!call) return call.result;
  return flags == 0 ? call.machine->memory_.Reserve(size_bytes, alignment, address) : cu::kInvalidValue;
}
cu::Result Driver::MemAddressFree(cu::DevicePtr address, size_t size_bytes) {
  const Call call = Enter("cuMemAddressFree");
  return call ? call.machine->memory_.Free(address, size_bytes) : call.result;
}
cu::Result Driver::MemMap(cu::DevicePtr address, size_t size_bytes, size_t offset, cu::MemHandle handle,
                          unsigned long long flags) {
  const Call call = Enter("cuMemMap");
  if (!call) return call.result;
  return flags == 0 ? call.machine->memory_.Map(address, size_bytes, offset, handle) : cu::kInvalidValue;
}
cu::Result Driver::MemUnmap(cu::DevicePtr address, size_t size_bytes) {
  const Call call = Enter("cuMemUnmap");
  if (call) call.machine->AwaitUnmapping();
  return call ? call.machine->memory_.Unmap(address, size_bytes) : call.result;
}
cu::Result Driver::MemSetAccess(cu::DevicePtr address, size_t size_bytes, const cu::MemAccessDesc* descs,
                                size_t count) {
  const Call call = Enter("cuMemSetAccess");
  return call ? call.machine->memory_.SetAccess(address, size_bytes, descs, count) : call.result;
}
cu::Result Driver::MemExportToShareableHandle(void* shareable, cu::MemHandle handle, int handle_type,
                                              unsigned long long flags) {
  const Call call = Enter("cuMemExportToShareableHandle");
  if (!call) return call.result;
  if (flags != 0) return cu::kInvalidValue;
  return call.machine->memory_.Export(handle, handle_type, static_cast<int*>(shareable));
}
cu::Result Driver::MemImportFromShareableHandle(cu::MemHandle* handle, void* os_handle, int handle_type) {
  const Call call = Enter("cuMemImportFromShareableHandle");
  if (!call) return call.result;
  return call.machine->memory_.Import(static_cast<int>(reinterpret_cast<intptr_t>(os_handle)), handle_type, handle);
}
cu::Result Driver::MemHostRegister(void* p, size_t size_bytes, unsigned flags) {
  const Call call = EnterContext("cuMemHostRegister");
  return call ? call.machine->memory_.HostRegister(p, size_bytes, flags) : call.result;
}
cu::Result Driver::MemHostUnregister(void* p) {
  const Call call = EnterContext("cuMemHostUnregister");
  return call ? call.machine->memory_.HostUnregister(p) : call.result;
}
cu::Result Driver::MemHostGetDevicePointer(cu::DevicePtr* address, void* p, unsigned) {
  const Call call = EnterContext("cuMemHostGetDevicePointer");
  return call ? call.machine->memory_.HostDevicePointer(p, address) : call.result;
}

}  // namespace shardd::fake_cuda
