// What the conformance suites run on without a GPU.

#include "tests/server/device/fake_cuda_world.h"

namespace shardd {

std::vector<DeviceKind> DeviceKinds() {
  return {
      {"Cpu", []() -> std::unique_ptr<DeviceWorld> { return std::make_unique<CpuWorld>(); }},
      {"FakeCuda", []() -> std::unique_ptr<DeviceWorld> { return std::make_unique<FakeCudaWorld>(); }},
      {"FakeCudaWithDelays",
       []() -> std::unique_ptr<DeviceWorld> { return std::make_unique<FakeCudaWorld>(20261121); }},
      {"FakeCudaOverSpreadSlabs", []() -> std::unique_ptr<DeviceWorld> { return std::make_unique<SpreadCudaWorld>(); }},
  };
}

std::vector<CudaKind> CudaKinds() {
  return {{"FakeCuda", []() -> std::unique_ptr<CudaWorld> { return std::make_unique<FakeCudaWorld>(); }}};
}

}  // namespace shardd
