#ifndef SHARDD_TESTS_GPU_REAL_CUDA_WORLD_H_
#define SHARDD_TESTS_GPU_REAL_CUDA_WORLD_H_

#include <memory>
#include <memory_resource>
#include <optional>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "tests/gpu/gpu.h"
#include "tests/server/device/device_world.h"

namespace shardd {

// The machine's first GPU. What operations name lies in memory of the host that is registered once for the process:
// a world begins at its start, so there is one at a time.
class RealCudaWorld final : public CudaWorld {
 public:
  static absl::Span<const unsigned char> Kernels();

  RealCudaWorld();
  std::string why_not() const override { return why_not_; }
  const CudaDriver& driver() const override;
  int gpus() const override { return 1; }
  std::vector<std::unique_ptr<Device>> MakeAll() override { return MakeMany(1); }
  // So many devices of the one GPU.
  std::vector<std::unique_ptr<Device>> MakeMany(int count);
  using CudaWorld::Make;
  std::unique_ptr<CudaDevice> Make(const CudaDeviceOptions& options) override;
  std::pmr::memory_resource* memory() override { return &*memory_; }

 private:
  std::string why_not_;
  cuda::Gpu* gpu_ = nullptr;
  std::optional<std::pmr::monotonic_buffer_resource> memory_;
};

}  // namespace shardd

#endif  // SHARDD_TESTS_GPU_REAL_CUDA_WORLD_H_
