#include "tests/e2e/ranks/device_values.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace shardd::e2e {
namespace {

constexpr size_t kPageBytes = 4096;

CudaDriver LoadDriver() {
  absl::StatusOr<CudaDriver> driver = CudaDriver::Load();
  if (driver.ok()) return *std::move(driver);
  (void)fprintf(stderr, "%s\n", driver.status().ToString().c_str());
  abort();
}

CUdeviceptr Address(const void* p) { return static_cast<CUdeviceptr>(reinterpret_cast<uintptr_t>(p)); }

}  // namespace

RankGpu::RankGpu(int ordinal) : driver_(LoadDriver()) {
  CUdevice device = 0;
  Must(driver_->DeviceGet(&device, ordinal), "cuDeviceGet");
  Must(driver_->DevicePrimaryCtxRetain(&context_, device), "cuDevicePrimaryCtxRetain");
  Must(driver_->CtxSetCurrent(context_), "cuCtxSetCurrent");
}

void RankGpu::Must(CUresult result, const char* call) const {
  if (result == CUDA_SUCCESS) return;
  (void)fprintf(stderr, "%s\n", driver_.Check(result, call, "of a rank").ToString().c_str());
  abort();
}

CUstream RankGpu::MakeStream() const {
  CUstream stream = nullptr;
  Must(driver_->StreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0), "cuStreamCreateWithPriority");
  return stream;
}

void RankGpu::Copy(CUstream stream, void* to, const void* from, size_t size_bytes) const {
  Must(driver_->MemcpyAsync(Address(to), Address(from), size_bytes, stream), "cuMemcpyAsync");
}

void RankGpu::Launch(CUstream stream, CUhostFn function, void* user_data) const {
  Must(driver_->LaunchHostFunc(stream, function, user_data), "cuLaunchHostFunc");
}

void RankGpu::Synchronise(CUstream stream) const { Must(driver_->StreamSynchronize(stream), "cuStreamSynchronize"); }

void RankGpu::BeginCapture(CUstream stream) const {
  Must(driver_->StreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "cuStreamBeginCapture");
}

CUgraphExec RankGpu::EndCapture(CUstream stream) const {
  CUgraph graph = nullptr;
  CUgraphExec exec = nullptr;
  Must(driver_->StreamEndCapture(stream, &graph), "cuStreamEndCapture");
  Must(driver_->GraphInstantiateWithFlags(&exec, graph, 0), "cuGraphInstantiateWithFlags");
  Must(driver_->GraphDestroy(graph), "cuGraphDestroy");
  return exec;
}

void RankGpu::DropGraph(CUgraphExec exec) const { Must(driver_->GraphExecDestroy(exec), "cuGraphExecDestroy"); }

void* RankGpu::Pinned(size_t size_bytes) const {
  const size_t whole_bytes = (size_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  void* const memory = aligned_alloc(kPageBytes, whole_bytes);
  std::memset(memory, 0, whole_bytes);
  Must(driver_->MemHostRegister(memory, whole_bytes, CU_MEMHOSTREGISTER_PORTABLE), "cuMemHostRegister");
  return memory;
}

void DeviceValues::Use(int cuda_device) {
  if (cuda_device == cuda_device_) return;
  cuda_device_ = cuda_device;
  gpu_ = cuda_device < 0 ? nullptr : std::make_unique<RankGpu>(cuda_device);
  stream_ = gpu_ == nullptr ? nullptr : gpu_->MakeStream();
}

void DeviceValues::Copy(void* to, const void* from, size_t size_bytes) const {
  if (gpu_ == nullptr) {
    std::memcpy(to, from, size_bytes);
    return;
  }
  gpu_->Copy(stream_, to, from, size_bytes);
  gpu_->Synchronise(stream_);
}

}  // namespace shardd::e2e
