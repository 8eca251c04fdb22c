// What a stream runs: copies, memsets, host functions, kernels.

#include <cstring>
#include <utility>
#include <vector>

#include "tests/fakes/cuda/calls.h"

namespace shardd::fake_cuda {
namespace {

const void* Pointer(CUdeviceptr address) { return reinterpret_cast<const void*>(address); }
void* MutablePointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

}  // namespace

CUresult Driver::MemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t size_bytes, CUstream stream) {
  const Call call = EnterStream("cuMemcpyAsync", stream);
  if (!call) return call.result;
  Machine& m = *call.machine;
  const bool pageable_src = !m.memory_.Knows(Pointer(src), size_bytes);
  const bool pageable_dst = !m.memory_.Knows(Pointer(dst), size_bytes);
  if (m.memory_.IsReadOnly(call.gpu, Pointer(dst), size_bytes)) return CUDA_ERROR_INVALID_VALUE;
  const bool host = !m.memory_.IsOnGpu(Pointer(src)) || !m.memory_.IsOnGpu(Pointer(dst));
  if (std::unique_lock lock(m.mutex_); host && m.gpus_[static_cast<size_t>(call.gpu)].hangs_host_copy) {
    m.gpus_[static_cast<size_t>(call.gpu)].hangs_host_copy = false;
    call.stream->Hang(true);
  }
  const CUresult result = Enqueue(call, [&m, dst, src, size_bytes, pageable_src, pageable_dst](Stream& on) {
    const bool fine = (pageable_src || m.memory_.Reaches(on.gpu(), Pointer(src), size_bytes, false)) &&
                      (pageable_dst || m.memory_.Reaches(on.gpu(), Pointer(dst), size_bytes, true));
    if (!fine) return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (m.DiesIn("cuMemcpyAsync")) {
      std::memcpy(MutablePointer(dst), Pointer(src), size_bytes / 2);
      Machine::Die();
    }
    std::memcpy(MutablePointer(dst), Pointer(src), size_bytes);
    return CUDA_SUCCESS;
  });
  if (result != CUDA_SUCCESS || (!pageable_src && !pageable_dst)) return result;
  {
    std::lock_guard lock(m.mutex_);
    ++m.pageable_copies_;
  }
  call.stream->WaitUntilIdle();  // the driver stages such memory, on the caller's thread
  return Outcome(call);
}
CUresult Driver::MemsetD8Async(CUdeviceptr dst, unsigned char value, size_t size_bytes, CUstream stream) {
  const Call call = EnterStream("cuMemsetD8Async", stream);
  if (!call) return call.result;
  Machine& m = *call.machine;
  if (!m.memory_.Knows(Pointer(dst), size_bytes) || m.memory_.IsReadOnly(call.gpu, Pointer(dst), size_bytes)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return Enqueue(call, [&m, dst, value, size_bytes](Stream& on) {
    if (!m.memory_.Reaches(on.gpu(), Pointer(dst), size_bytes, true)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    const bool dies = m.DiesIn("cuMemsetD8Async");
    std::memset(MutablePointer(dst), value, dies ? size_bytes / 2 : size_bytes);
    if (dies) Machine::Die();
    return CUDA_SUCCESS;
  });
}
CUresult Driver::LaunchHostFunc(CUstream stream, CUhostFn function, void* user_data) {
  const Call call = EnterStream("cuLaunchHostFunc", stream);
  if (!call) return call.result;
  if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return Enqueue(call, [function, user_data](Stream& on) {
    if (on.Stopped()) return CUDA_SUCCESS;
    ThisThread().in_host_function = true;
    function(user_data);
    ThisThread().in_host_function = false;
    return CUDA_SUCCESS;
  });
}

CUresult Driver::LibraryLoadData(CUlibrary* library, const void* code, CUjit_option*, void**, unsigned,
                                 CUlibraryOption*, void**, unsigned) {
  const Call call = Enter("cuLibraryLoadData");
  if (!call) return call.result;
  if (code == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (std::memcmp(code, kFatbinMagic, 4) != 0) return CUDA_ERROR_INVALID_IMAGE;
  std::lock_guard lock(call.machine->mutex_);
  *library = reinterpret_cast<CUlibrary>(call.machine->next_object_++);
  call.machine->libraries_[*library] = 1;
  return CUDA_SUCCESS;
}
CUresult Driver::LibraryUnload(CUlibrary library) {
  const Call call = Enter("cuLibraryUnload");
  if (!call) return call.result;
  std::lock_guard lock(call.machine->mutex_);
  return call.machine->libraries_.erase(library) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
CUresult Driver::LibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
  const Call call = Enter("cuLibraryGetKernel");
  if (!call) return call.result;
  std::lock_guard lock(call.machine->mutex_);
  if (call.machine->libraries_.count(library) == 0) return CUDA_ERROR_INVALID_HANDLE;
  const auto it = call.machine->kernels_.find(name);
  if (it == call.machine->kernels_.end()) return CUDA_ERROR_NOT_FOUND;
  *kernel = reinterpret_cast<CUkernel>(it->second.get());
  return CUDA_SUCCESS;
}
CUresult Driver::LaunchKernel(CUfunction kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                              unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void** params,
                              void** extra) {
  const Call call = EnterStream("cuLaunchKernel", stream);
  if (!call) return call.result;
  Machine& m = *call.machine;
  const Machine::Kernel* found = nullptr;
  {
    std::lock_guard lock(m.mutex_);
    for (const auto& [name, known] : m.kernels_) {
      if (reinterpret_cast<CUfunction>(known.get()) == kernel) found = known.get();
    }
  }
  if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const uint64_t threads = uint64_t{block_x} * block_y * block_z;
  if (uint64_t{grid_x} * grid_y * grid_z == 0 || threads == 0 || threads > 1024 || shared_bytes > 48 * 1024 ||
      params == nullptr || params[0] == nullptr || extra != nullptr) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // Parameters are copied before the call returns.
  const char* const bytes = static_cast<const char*>(params[0]);
  return Enqueue(call, [&m, found, args = std::vector<char>(bytes, bytes + found->args_bytes)](Stream& on) {
    const bool dies = m.DiesIn(found->name);
    const bool fine = found->function({args.data(), m.memory_, on.gpu(), dies});
    if (dies) Machine::Die();
    return fine ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
  });
}
}  // namespace shardd::fake_cuda
