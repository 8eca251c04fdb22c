// Does memory of a GPU outlive the process that made it, while a custodian without a context holds its descriptor, and
// does the next process see every byte, also where a kernel of the dead one was running?

#include "server/custodian/custody.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/gpu/trainer.h"
#include "tests/testing/files.h"
#include "tests/testing/poll.h"

namespace shardd::cuda {
namespace {

constexpr int kKept = 0, kRunning = 1, kStop = 2;
constexpr int64_t kHalf = int64_t{32} << 20;
constexpr uint64_t kJob = 7;

std::vector<char> Pattern() {
  std::vector<char> bytes(static_cast<size_t>(2 * kHalf));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 7 + i / 256 + 3);
  return bytes;
}

// Arguments: the custodian's socket, and whether a kernel is to run that writes the second half for ever.
int MakeAndKeep(Gpu& gpu, SharedPage& page, const std::vector<std::string>& arguments) {
  const auto custody = Custody::Connect(arguments[0], absl::Seconds(10));
  const CudaSlab slab = gpu.Allocate(2 * kHalf);
  const absl::StatusOr<UniqueFd> fd = slab.ExportFd();
  if (!custody.ok() || !fd.ok() || !(*custody)->Put(kJob, "shards", fd->get()).ok()) return 2;
  const std::vector<char> bytes = Pattern();
  gpu.Copy(bytes.data(), slab.data(), slab.size_bytes());
  gpu.Wait();
  page.Store(kKept, 1);
  if (arguments[1] == "1") {
    LaunchWriter(gpu, static_cast<char*>(slab.data()) + kHalf, kHalf / 4, page.Address(kRunning), page.Address(kStop));
  }
  return page.Await(kStop, 1) ? 0 : 3;
}
const RegisterTrainer kMakeAndKeep("make_and_keep", &MakeAndKeep);

// Arguments: the custodian's socket, and how many of the bytes nobody has written meanwhile.
int TakeUpAndRead(Gpu& gpu, SharedPage& page, const std::vector<std::string>& arguments) {
  (void)page;
  const auto custody = Custody::Connect(arguments[0], absl::Seconds(10));
  if (!custody.ok()) return 2;
  Custody::Objects objects = (*custody)->TakeUp();
  const int fd = objects[{kJob, "shards"}].get();
  const absl::StatusOr<CudaSlab> slab =
      CudaSlab::Import(&gpu.driver(), 0, fd, 2 * kHalf, CudaSlab::Access::kReadWrite, "slab of the daemon before");
  if (!slab.ok()) {
    std::fprintf(stderr, "%s\n", std::string(slab.status().message()).c_str());
    return 3;
  }
  const size_t untouched = static_cast<size_t>(std::atoll(arguments[1].c_str()));
  const std::vector<char> want = Pattern();
  std::vector<char> got(want.size());
  gpu.Copy(slab->data(), got.data(), slab->size_bytes());
  gpu.Wait();
  if (std::memcmp(got.data(), want.data(), untouched) != 0) return 4;
  // Nobody writes there any more, and kernels run on it.
  gpu.Copy(want.data(), slab->data(), slab->size_bytes());
  gpu.Launch(CastArgs{slab->data(), static_cast<char*>(slab->data()) + kHalf, kHalf / 4, kFloat32, kBFloat16, 1}, 0);
  gpu.Wait();
  gpu.Copy(slab->data(), got.data(), slab->size_bytes());
  gpu.Wait();
  std::vector<char> again(got.size());
  gpu.Copy(slab->data(), again.data(), slab->size_bytes());
  gpu.Wait();
  return got == again && std::memcmp(got.data(), want.data(), kHalf) == 0 ? 0 : 5;
}
const RegisterTrainer kTakeUpAndRead("take_up_and_read", &TakeUpAndRead);

class CustodyOfGpuMemory : public ::testing::TestWithParam<bool> {};

TEST_P(CustodyOfGpuMemory, OutlivesItsExporterWithEveryByte) {
  std::string why;
  Gpu* const gpu = Gpu::Get(&why);
  if (gpu == nullptr) GTEST_SKIP() << why;
  const bool with_kernel = GetParam();
  const char* const mps = std::getenv("SHARDD_GPU_MPS");
  if (with_kernel && mps != nullptr && std::strcmp(mps, "on") == 0) {
    GTEST_SKIP() << "a client of MPS that is killed while its kernel runs takes all clients of the GPU along";
  }
  const testing::TempDir folder;
  const std::string path = folder.File("custody.sock");
  const testing::Child custodian = testing::Spawn({"/proc/self/exe", "--custodian", path});
  ASSERT_TRUE(testing::PollUntil([&] { return access(path.c_str(), F_OK) == 0; }));
  for (int round = 0; round < 3; ++round) {
    SharedPage page(*gpu);
    testing::Child owner = StartTrainer("make_and_keep", page, {path, with_kernel ? "1" : "0"});
    ASSERT_TRUE(page.Await(kKept, 1)) << owner.Wait(absl::Seconds(1));
    if (with_kernel) {
      ASSERT_TRUE(page.Await(kRunning, 2)) << owner.Wait(absl::Seconds(1));
    }
    owner.Kill(SIGKILL);
    ASSERT_EQ(owner.Wait(), 1000 + SIGKILL);
    testing::Child next = StartTrainer("take_up_and_read", page, {path, absl::StrCat(with_kernel ? kHalf : 2 * kHalf)});
    EXPECT_EQ(next.Wait(), 0) << "2: no custody, 3: no import, 4: other bytes, 5: not usable";
  }
}

INSTANTIATE_TEST_SUITE_P(Owners, CustodyOfGpuMemory, ::testing::Bool(),
                         [](const auto& info) { return std::string(info.param ? "WithAKernel" : "Idle"); });

}  // namespace
}  // namespace shardd::cuda
