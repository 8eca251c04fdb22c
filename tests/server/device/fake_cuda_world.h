#ifndef SHARDD_TESTS_SERVER_DEVICE_FAKE_CUDA_WORLD_H_
#define SHARDD_TESTS_SERVER_DEVICE_FAKE_CUDA_WORLD_H_

// Worlds without a GPU (device_world.h).

#include <sys/mman.h>

#include <memory>
#include <memory_resource>
#include <optional>
#include <string>
#include <vector>

#include "server/device/cuda/make_cuda_devices.h"
#include "server/device/devices.h"
#include "tests/fakes/cuda/kernels.h"
#include "tests/fakes/cuda/machine.h"
#include "tests/server/device/device_world.h"

namespace shardd {

class CpuWorld final : public DeviceWorld {
 public:
  std::vector<std::unique_ptr<Device>> MakeAll() override { return std::move(MakeDevices("cpu:2")->devices); }
  std::pmr::memory_resource* memory() override { return std::pmr::new_delete_resource(); }
};

// Host memory that a driver knows: device and host address are the same. Pages are there when they are touched.
class RegisteredMemory {
 public:
  RegisteredMemory(const CudaDriver& driver, size_t size_bytes) : driver_(driver), size_bytes_(size_bytes) {
    p_ = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    (void)driver_->DevicePrimaryCtxRetain(&context_, 0);
    const ScopedCudaContext current(driver_, context_);
    result_ = driver_->MemHostRegister(p_, size_bytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
    resource_.emplace(p_, size_bytes, std::pmr::null_memory_resource());
  }
  RegisteredMemory(const RegisteredMemory&) = delete;
  RegisteredMemory& operator=(const RegisteredMemory&) = delete;
  ~RegisteredMemory() {
    {
      const ScopedCudaContext current(driver_, context_);
      (void)driver_->MemHostUnregister(p_);
    }
    (void)driver_->DevicePrimaryCtxRelease(0);
    munmap(p_, size_bytes_);
  }
  CUresult result() const { return result_; }
  std::pmr::memory_resource* resource() { return &*resource_; }

 private:
  const CudaDriver driver_;
  const size_t size_bytes_;
  void* p_ = nullptr;
  CUcontext context_ = nullptr;
  CUresult result_ = CUDA_ERROR_UNKNOWN;
  std::optional<std::pmr::monotonic_buffer_resource> resource_;
};

// Two fake GPUs; with a seed, every operation starts late by a random time.
class FakeCudaWorld final : public CudaWorld {
 public:
  static fake_cuda::MachineOptions Options(uint64_t delay_seed, int gpus, size_t queue_limit) {
    fake_cuda::MachineOptions options;
    options.queue_limit = queue_limit;
    options.gpus = gpus;
    options.delay_seed = delay_seed;
    return options;
  }
  explicit FakeCudaWorld(uint64_t delay_seed = 0, int gpus = 2, size_t queue_limit = 1024)
      : gpus_(gpus), machine_(Options(delay_seed, gpus, queue_limit)) {
    fake_cuda::AddReferenceKernels(machine_);
    (void)driver_->Init(0);
    memory_.emplace(driver_, size_t{512} << 20);
  }
  fake_cuda::Machine& machine() { return machine_; }
  const CudaDriver& driver() const override { return driver_; }
  int gpus() const override { return gpus_; }
  std::vector<std::unique_ptr<Device>> MakeAll() override {
    return std::move(MakeCudaDevices(driver_, {true, {}}, absl::MakeConstSpan(fake_cuda::kFatbinMagic))->devices);
  }
  using CudaWorld::Make;
  std::unique_ptr<CudaDevice> Make(const CudaDeviceOptions& options) override {
    return *CudaDevice::Create(driver_, 0, absl::MakeConstSpan(fake_cuda::kFatbinMagic), options);
  }
  std::pmr::memory_resource* memory() override { return memory_->resource(); }

 private:
  const int gpus_;
  fake_cuda::Machine machine_;
  const CudaDriver driver_{fake_cuda::Table()};
  std::optional<RegisteredMemory> memory_;
};

// The same, and what operations name lies in a slab that is spread over both GPUs, page by page; the first of it over
// the edge of two.
class SpreadCudaWorld final : public DeviceWorld {
 public:
  SpreadCudaWorld() : world_(/*delay_seed=*/11) {
    devices_ = world_.MakeAll();
    DeviceMemory* const gpus[] = {devices_[0]->memory(), devices_[1]->memory()};
    const int64_t page_bytes = *gpus[0]->PageBytes();
    std::vector<DeviceMemory::Part> parts;
    for (size_t i = 0; i < 128; ++i) parts.push_back({gpus[i % 2], page_bytes});
    slab_ = *gpus[0]->MakeSpreadSlab("spread", parts, {gpus[0], gpus[1]});
    const int64_t skipped_bytes = page_bytes - 64;
    resource_.emplace(slab_->data() + skipped_bytes, static_cast<size_t>(slab_->size_bytes() - skipped_bytes),
                      std::pmr::null_memory_resource());
  }
  std::vector<std::unique_ptr<Device>> MakeAll() override { return world_.MakeAll(); }
  std::pmr::memory_resource* memory() override { return &*resource_; }

 private:
  FakeCudaWorld world_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::unique_ptr<DeviceSlab> slab_;
  std::optional<std::pmr::monotonic_buffer_resource> resource_;
};

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_DEVICE_FAKE_CUDA_WORLD_H_
