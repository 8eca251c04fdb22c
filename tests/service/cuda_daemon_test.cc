// The real daemon as a process, on GPUs that are the fake driver's: it finds libcuda.so.1 as on any machine.

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/daemon_process.h"
#include "tests/testing/fake_cuda.h"
#include "tests/testing/files.h"
#include "tests/testing/poll.h"

namespace shardd {
namespace {

using ::shardd::testing::DaemonProcess;
using ::shardd::testing::FakeCudaEnvironment;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

// What a daemon said that ends before it listens.
std::string Refusal(const std::string& devices, const std::vector<std::string>& environment) {
  const ::shardd::testing::TempDir folder;
  DaemonProcess daemon(folder.path(), devices, {}, environment);
  EXPECT_FALSE(daemon.listened());
  EXPECT_EQ(daemon.process().Wait(), 1);
  return ::shardd::testing::ReadWholeFile(daemon.log());
}

TEST(CudaDaemonTest, AMachineThatDoesNotServeSaysWhichGpuAndWhy) {
  EXPECT_THAT(Refusal("cuda:all", FakeCudaEnvironment(0)),
              AllOf(HasSubstr("make devices \"cuda:all\""), HasSubstr("finds no usable GPU: cuInit"),
                    HasSubstr("CUDA_ERROR_NO_DEVICE")));
  EXPECT_THAT(Refusal("cuda:0,2", FakeCudaEnvironment(2)), HasSubstr("find GPU 2: the driver shows 2"));
  // The first GPU's context is fine, the second's is not.
  EXPECT_THAT(Refusal("cuda:all", FakeCudaEnvironment(2, {"FAKE_CUDA_FAIL=cuDevicePrimaryCtxRetain:2:2"})),
              AllOf(HasSubstr("CUDA_ERROR_OUT_OF_MEMORY"), HasSubstr("device=cuda:1")));
  EXPECT_THAT(Refusal("cuda:0", FakeCudaEnvironment(1, {"FAKE_CUDA_MEMOPS=0"})),
              HasSubstr("use cuda:0: the GPU has no 64-bit stream memory operations"));
  EXPECT_THAT(Refusal("cuda:0", FakeCudaEnvironment(1, {"FAKE_CUDA_DRIVER_VERSION=11080"})),
              HasSubstr("it is too old (got CUDA 11.8, want 12.0 or later)"));
  // A kernel that is not there, which the daemon asks for by name.
  EXPECT_THAT(Refusal("cuda:0", FakeCudaEnvironment(1, {"FAKE_CUDA_FAIL=cuLibraryGetKernel:3:500"})),
              AllOf(HasSubstr("cuLibraryGetKernel"), HasSubstr("CUDA_ERROR_NOT_FOUND")));
}

// What shardctl prints, on either stream.
std::string Shardctl(const DaemonProcess& daemon, const ::shardd::testing::TempDir& folder,
                     const std::string& command) {
  const std::string log = folder.File(command);
  ::shardd::testing::Child child =
      ::shardd::testing::Spawn({SHARDD_CTL_PATH, "--address=" + daemon.address(), command}, {.log = log});
  EXPECT_EQ(child.Wait(), 0);
  return ::shardd::testing::ReadWholeFile(log);
}

TEST(CudaDaemonTest, EveryGpuIsServedWithItsStreamsUnderItsName) {
  const ::shardd::testing::TempDir folder;
  DaemonProcess daemon(folder.path(), "cuda:1,0", {}, FakeCudaEnvironment(2));
  ASSERT_TRUE(daemon.listened()) << ::shardd::testing::ReadWholeFile(daemon.log());
  // It says so once it listens: later than a connection may come.
  EXPECT_TRUE(::shardd::testing::PollUntil([&] {
    return absl::StrContains(::shardd::testing::ReadWholeFile(daemon.log()), "with 2 device(s)");
  })) << ::shardd::testing::ReadWholeFile(daemon.log());
  EXPECT_THAT(Shardctl(daemon, folder, "status"), ContainsRegex("devices +cuda:1 cuda:0\n"));  // in the order asked for
  const std::string streams = Shardctl(daemon, folder, "streams");
  for (const char* gpu : {"cuda:0", "cuda:1"}) {
    for (const char* stream : {"pre_unshard", "unshard", "post_backward", "all_reduce", "optimizer"}) {
      EXPECT_THAT(streams, ContainsRegex(absl::StrCat(gpu, " +", stream, " +0 +0 +0")));
    }
  }
  daemon.process().Kill(SIGTERM);
  EXPECT_EQ(daemon.process().Wait(), 0);
}

}  // namespace
}  // namespace shardd
