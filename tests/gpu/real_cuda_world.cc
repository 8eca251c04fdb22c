#include "tests/gpu/real_cuda_world.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

#include "common/cuda/kernel_image.h"
#include "server/collective/local/local_collective.h"
#include "tests/server/collective/collective_fixture.h"

namespace shardd {
namespace {

constexpr size_t kMemoryBytes = size_t{512} << 20;

// Never given back: the process's end does that.
char* Registered(const CudaDriver& driver) {
  static char* const memory = [&] {
    void* const p = mmap(nullptr, kMemoryBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const CUresult result =
        driver->MemHostRegister(p, kMemoryBytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
    CUdeviceptr address = 0;
    if (result != CUDA_SUCCESS || driver->MemHostGetDevicePointer(&address, p, 0) != CUDA_SUCCESS ||
        address != reinterpret_cast<CUdeviceptr>(p)) {
      std::fprintf(stderr, "registered memory: result %d, address %llx for %p\n", result, address, p);
      std::abort();
    }
    return static_cast<char*>(p);
  }();
  return memory;
}

class LocalCudaWorld final : public CollectiveWorld {
 public:
  explicit LocalCudaWorld(int devices) : devices_(devices) {}
  std::vector<std::unique_ptr<Device>> MakeDevices() override { return world_.MakeMany(devices_); }
  std::pmr::memory_resource* memory() override { return world_.memory(); }
  std::unique_ptr<Collective> Make(std::vector<Device*> of_ranks) override {
    return std::make_unique<LocalCollective>(std::move(of_ranks));
  }

 private:
  const int devices_;
  RealCudaWorld world_;
};

}  // namespace

absl::Span<const unsigned char> RealCudaWorld::Kernels() {
  return absl::MakeConstSpan(static_cast<const unsigned char*>(cuda::kKernelImage), cuda::kKernelImageSizeBytes);
}

RealCudaWorld::RealCudaWorld() : gpu_(cuda::Gpu::Get(&why_not_)) {
  if (gpu_ == nullptr) return;
  memory_.emplace(Registered(gpu_->driver()), kMemoryBytes, std::pmr::null_memory_resource());
}

const CudaDriver& RealCudaWorld::driver() const {
  static const CudaDriver none{cu::DriverTable()};  // nothing of it is called
  return gpu_ == nullptr ? none : gpu_->driver();
}

std::vector<std::unique_ptr<Device>> RealCudaWorld::MakeMany(int count) {
  std::vector<std::unique_ptr<Device>> devices;
  for (int i = 0; i < count; ++i) devices.push_back(Make());
  return devices;
}

std::unique_ptr<CudaDevice> RealCudaWorld::Make(const CudaDeviceOptions& options) {
  auto device = CudaDevice::Create(gpu_->driver(), 0, Kernels(), options);
  if (!device.ok()) {
    std::fprintf(stderr, "%s\n", std::string(device.status().message()).c_str());
    std::abort();
  }
  return *std::move(device);
}

std::vector<DeviceKind> DeviceKinds() {
  return {{"RealCuda", []() -> std::unique_ptr<DeviceWorld> { return std::make_unique<RealCudaWorld>(); }}};
}

std::vector<CudaKind> CudaKinds() {
  return {{"RealCuda", []() -> std::unique_ptr<CudaWorld> { return std::make_unique<RealCudaWorld>(); }}};
}

std::vector<CollectiveImplementation> LocalCollectives() {
  return {{"local_on_a_gpu", [](int, int devices) { return std::make_unique<LocalCudaWorld>(devices); },
           [] {
             std::string why;
             (void)cuda::Gpu::Get(&why);
             return why;
           }}};
}
// Between ranks that share a GPU there is no other: NCCL wants one for each.
std::vector<CollectiveImplementation> Collectives() { return LocalCollectives(); }

}  // namespace shardd
