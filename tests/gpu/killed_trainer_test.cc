// A trainer that dies by SIGKILL takes nothing of the memory along that it had from the daemon, whatever it was doing.

#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "tests/gpu/trainer.h"

namespace shardd::cuda {
namespace {

constexpr int kWritten = 0, kRunning = 1, kStop = 2;
constexpr int64_t kHalf = int64_t{32} << 20;

// Arguments: a descriptor of a slab, its size, and whether a kernel is to run that writes its second half.
int WriteAndWait(Gpu& gpu, SharedPage& page, const std::vector<std::string>& arguments) {
  int fd = 0;
  int64_t size_bytes = 0;
  if (!absl::SimpleAtoi(arguments[0], &fd) || !absl::SimpleAtoi(arguments[1], &size_bytes)) return 1;
  const absl::StatusOr<CudaSlab> slab =
      CudaSlab::Import(&gpu.driver(), 0, fd, size_bytes, CudaSlab::Access::kReadWrite, "slab of the daemon");
  if (!slab.ok()) {
    std::fprintf(stderr, "%s\n", std::string(slab.status().message()).c_str());
    return 2;
  }
  char* const second_half = static_cast<char*>(slab->data()) + kHalf;
  gpu.Check(gpu.driver()->MemsetD8Async(reinterpret_cast<CUdeviceptr>(second_half), 0x5a, kHalf, gpu.stream()),
            "cuMemsetD8Async");
  gpu.Wait();
  page.Store(kWritten, 1);
  if (arguments[2] == "1") {
    LaunchWriter(gpu, second_half, kHalf / 4, page.Address(kRunning), page.Address(kStop));
  }
  return page.Await(kStop, 1) ? 0 : 3;
}
const RegisterTrainer kWriteAndWait("write_and_wait", &WriteAndWait);

class KilledTrainerTest : public ::testing::TestWithParam<bool> {
 protected:
  std::vector<char> Read(const CudaSlab& slab) {
    std::vector<char> bytes(static_cast<size_t>(slab.size_bytes()));
    gpu_->Copy(slab.data(), bytes.data(), slab.size_bytes());
    gpu_->Wait();
    return bytes;
  }
  Gpu* gpu_ = nullptr;
};

TEST_P(KilledTrainerTest, MemoryOfTheDaemonIsIntactAndUsable) {
  std::string why;
  gpu_ = Gpu::Get(&why);
  if (gpu_ == nullptr) GTEST_SKIP() << why;
  const bool with_kernel = GetParam();
  const char* const mps = std::getenv("SHARDD_GPU_MPS");
  if (with_kernel && mps != nullptr && std::strcmp(mps, "on") == 0) {
    GTEST_SKIP() << "a client of MPS that is killed while its kernel runs takes all clients of the GPU along";
  }
  const CudaSlab slab = gpu_->Allocate(2 * kHalf);
  ASSERT_EQ(slab.size_bytes(), 2 * kHalf);
  const UniqueFd fd = Inherited(*slab.ExportFd());
  std::vector<char> want(static_cast<size_t>(2 * kHalf));
  for (int round = 0; round < 3; ++round) {
    for (size_t i = 0; i < want.size(); ++i) want[i] = static_cast<char>(i * 7 + i / 256 + static_cast<size_t>(round));
    gpu_->Copy(want.data(), slab.data(), slab.size_bytes());
    gpu_->Wait();
    SharedPage page(*gpu_);
    auto trainer = StartTrainer("write_and_wait", page,
                                {absl::StrCat(fd.get()), absl::StrCat(slab.size_bytes()), with_kernel ? "1" : "0"});
    ASSERT_TRUE(page.Await(kWritten, 1)) << trainer.Wait(absl::Seconds(1));
    if (with_kernel) {
      ASSERT_TRUE(page.Await(kRunning, 2)) << trainer.Wait(absl::Seconds(1));
    }
    const auto begin = std::chrono::steady_clock::now();
    trainer.Kill(SIGKILL);
    ASSERT_EQ(trainer.Wait(), 1000 + SIGKILL);
    std::vector<char> got = Read(slab);
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
    std::printf("[ GPU      ] killed%s: %.0f ms until its memory was read\n", with_kernel ? " with a kernel" : "",
                took.count());
    EXPECT_EQ(std::memcmp(got.data(), want.data(), kHalf), 0) << "what the trainer did not write";
    if (!with_kernel) {
      EXPECT_EQ(got[kHalf], 0x5a);
      EXPECT_EQ(std::memcmp(got.data() + kHalf, got.data() + kHalf + 1, kHalf - 1), 0) << "what it wrote";
    }
    // Nothing of it writes any more, and kernels of the daemon run there.
    const uint64_t last = page.Load(kRunning);
    gpu_->Copy(want.data(), slab.data(), slab.size_bytes());
    gpu_->Launch(CastArgs{slab.data(), static_cast<char*>(slab.data()) + kHalf, kHalf / 4, kFloat32, kBFloat16, 1}, 0);
    gpu_->Wait();
    const std::vector<char> once = Read(slab);
    EXPECT_EQ(std::memcmp(once.data(), want.data(), kHalf), 0);
    EXPECT_TRUE(Read(slab) == once) << "somebody still writes";
    EXPECT_EQ(page.Load(kRunning), last);
  }
}

INSTANTIATE_TEST_SUITE_P(Trainers, KilledTrainerTest, ::testing::Bool(),
                         [](const auto& info) { return std::string(info.param ? "WithAKernel" : "Idle"); });

}  // namespace
}  // namespace shardd::cuda
