#include <algorithm>
#include <vector>

#include "tests/gpu/gpu.h"

// tests/server/device/kernel_*_test.cc on the GPU.
namespace shardd::cuda {
namespace {

class GpuKernelRunner : public KernelRunner {
 public:
  explicit GpuKernelRunner(Gpu* gpu) : gpu_(gpu) {}
  char* Allocate(int64_t size_bytes) override {
    const int64_t rounded = (size_bytes + 255) / 256 * 256;
    if (slabs_.empty() || slabs_.back().size_bytes() - used_ < rounded) {
      slabs_.push_back(gpu_->Allocate(std::max(rounded, int64_t{64} << 20)));
      used_ = 0;
    }
    char* at = static_cast<char*>(slabs_.back().data()) + used_;
    used_ += rounded;
    return at;
  }
  void Write(const void* host, void* to, int64_t size_bytes) override {
    gpu_->Copy(host, to, size_bytes);
    gpu_->Wait();
  }
  void Read(const void* from, void* host, int64_t size_bytes) override {
    gpu_->Copy(from, host, size_bytes);
    gpu_->Wait();
  }
  void Launch(const AnyArgs& args, uint32_t grid) override {
    gpu_->Launch(args, grid);
    gpu_->Wait();
  }

 private:
  Gpu* const gpu_;
  std::vector<CudaSlab> slabs_;
  int64_t used_ = 0;
};

}  // namespace

std::unique_ptr<KernelRunner> MakeKernelRunner(std::string* why) {
  Gpu* gpu = Gpu::Get(why);
  return gpu == nullptr ? nullptr : std::make_unique<GpuKernelRunner>(gpu);
}

}  // namespace shardd::cuda
