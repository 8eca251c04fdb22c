// A GPU that is lost to a kernel's illegal access, in a process of its own: everything there ends, and nothing here.

#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "tests/gpu/real_cuda_world.h"
#include "tests/gpu/trainer.h"

namespace shardd::cuda {
namespace {

// Its result is the step that was not as it should be.
int Lose(Gpu&, SharedPage&, const std::vector<std::string>&) {
  RealCudaWorld world;
  const std::unique_ptr<CudaDevice> device = world.Make();
  const std::unique_ptr<DeviceSlab> slab = *device->memory()->MakeSlab("slab", 1 << 20, {device->memory()});
  auto* const x = reinterpret_cast<float*>(slab->data());
  absl::Mutex mutex;
  std::vector<absl::Status> statuses;
  const auto submit = [&](StreamId stream, std::vector<DeviceOp> ops) {
    device->Submit(stream, {"work", std::move(ops), [&](absl::Status status) {
                              absl::MutexLock lock(&mutex);
                              statuses.push_back(std::move(status));
                            }});
  };
  const auto all_lost = [&](size_t count) {
    absl::MutexLock lock(&mutex);
    const auto enough = [&] { return statuses.size() >= count; };
    if (!mutex.AwaitWithTimeout(absl::Condition(&enough), absl::Seconds(30))) return false;
    for (const absl::Status& status : statuses) {
      std::fprintf(stderr, "%s\n", status.ToString().c_str());
      if (status.code() != absl::StatusCode::kDataLoss) return false;
      if (status.message().find("CUDA_ERROR_ILLEGAL_ADDRESS") == absl::string_view::npos) return false;
    }
    statuses.clear();
    return true;
  };
  const auto* const nowhere = reinterpret_cast<const float*>(uintptr_t{1} << 46);
  const ReduceOp wild = {{nowhere}, v1::DTYPE_FLOAT32, v1::DTYPE_UNSPECIFIED, 1, false, x, 64};
  submit(StreamId::kPostBackward, {wild, CopyOp{x, x + 1024, 256}});
  if (!all_lost(1)) return 1;
  if (device->lost().code() != absl::StatusCode::kDataLoss) return 2;
  for (int stream = 0; stream < kStreamCount; ++stream) submit(static_cast<StreamId>(stream), {CopyOp{x, x + 64, 4}});
  if (!all_lost(kStreamCount)) return 3;
  float read = 0;
  if (device->memory()->Read(&read, slab->data(), 4).ok()) return 4;
  const absl::Time begin = absl::Now();
  device->Shutdown();
  return absl::Now() - begin < absl::Seconds(5) ? 0 : 5;
}
const RegisterTrainer kLose("lose", &Lose);

// A word through a mapping that may only be read: the call takes it. Its result is the step that was otherwise.
int LoseByWord(Gpu& gpu, SharedPage&, const std::vector<std::string>&) {
  const CudaSlab slab = gpu.Allocate(1);
  const UniqueFd fd = *slab.ExportFd();
  const auto view =
      CudaSlab::Import(&gpu.driver(), 0, fd.get(), slab.size_bytes(), CudaSlab::Access::kReadOnly, "view of slab");
  if (!view.ok()) return 1;
  const auto address = reinterpret_cast<CUdeviceptr>(view->data());
  if (gpu.driver()->StreamWriteValue64(gpu.stream(), address, 1, 0) != CUDA_SUCCESS) return 2;
  if (gpu.driver()->StreamSynchronize(gpu.stream()) != CUDA_ERROR_LAUNCH_FAILED) return 3;
  return gpu.driver()->StreamQuery(gpu.stream()) == CUDA_ERROR_LAUNCH_FAILED ? 0 : 4;
}
const RegisterTrainer kLoseByWord("lose_by_word", &LoseByWord);

TEST(LostGpu, EndsAllWorkOfItsProcessAndNothingElse) {
  std::string why;
  Gpu* const gpu = Gpu::Get(&why);
  if (gpu == nullptr) GTEST_SKIP() << why;
  SharedPage page(*gpu);
  EXPECT_EQ(StartTrainer("lose", page).Wait(absl::Seconds(50)), 0);
  EXPECT_EQ(StartTrainer("lose_by_word", page).Wait(absl::Seconds(50)), 0);
  const CudaSlab slab = gpu->Allocate(1);
  gpu->Zero(slab.data(), slab.size_bytes());
  gpu->Wait();  // ends this process where the GPU is lost here too
}

}  // namespace
}  // namespace shardd::cuda
