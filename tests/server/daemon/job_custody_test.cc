// Whose memory lies on GPUs is taken up when the daemon before has ended, and with it what its streams were doing.

#include "server/daemon/take_up/job_custody.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "server/custodian/custodian.h"
#include "server/device/cuda/cuda_memory.h"
#include "tests/fakes/cuda/machine.h"
#include "tests/testing/files.h"
#include "tests/testing/process.h"

namespace shardd {
namespace {

constexpr uint64_t kJob = 7;

class JobCustodyTest : public ::testing::Test {
 protected:
  JobCustodyTest()
      : custodian_([path = path_] {
          auto custodian = Custodian::Create({path});
          if (!custodian.ok()) return 2;
          const UniqueFd never(eventfd(0, EFD_CLOEXEC));
          (*custodian)->Run(never.get());
          return 0;
        }) {
    EXPECT_TRUE(testing::PollUntil([this] { return access(path_.c_str(), F_OK) == 0; }));
  }
  std::shared_ptr<Custody> Connect() { return *Custody::Connect(path_, absl::Seconds(10)); }
  // What a daemon of this process leaves, which was another one then.
  void Leave(pid_t daemon) {
    const std::shared_ptr<Custody> custody = Connect();
    const UniqueFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, daemon, 0)));
    const UniqueFd memory(memfd_create("shards", MFD_CLOEXEC));
    ASSERT_TRUE(custody->Put(0, "daemon", pidfd.get()).ok());
    ASSERT_TRUE(custody->Put(kJob, "shards-0", memory.get()).ok());
  }
  // How long it took to be told that the job was not there for anybody.
  absl::Duration TakeUp(const SlabPlace& place) {
    const absl::Time start = absl::Now();
    auto left = JobCustody(Connect()).TakeUp(/*on_gpus=*/place.memory != nullptr);
    EXPECT_TRUE(left.ok()) << left.status();
    if (left.ok() && left->size() == 1) {
      EXPECT_EQ(left->front().first, kJob);
      const auto taken = ReadTakenUpJob(std::move(left->front().second), {{}, [&place](int) { return place; }});
      EXPECT_EQ(taken.status().code(), absl::StatusCode::kNotFound) << taken.status();
    } else {
      ADD_FAILURE() << "there is one job";
    }
    return absl::Now() - start;
  }

  const testing::TempDir folder_;
  const std::string path_ = folder_.File("custody.sock");
  testing::Child custodian_;
};

class OneGpu {
 public:
  OneGpu() : driver_(fake_cuda::Table()) {
    (void)driver_->Init(0);
    memory_ = *CudaMemory::Create(driver_, 0, absl::Seconds(10));
  }
  SlabPlace place() const { return {memory_.get(), {memory_.get()}}; }

 private:
  fake_cuda::Machine machine_;
  const CudaDriver driver_;
  std::unique_ptr<CudaMemory> memory_;
};

TEST_F(JobCustodyTest, OnGpusTheEndOfTheDaemonBeforeIsAwaited) {
  testing::Child former([] {
    absl::SleepFor(absl::Milliseconds(700));
    return 0;
  });
  Leave(former.pid());
  OneGpu gpu;
  const absl::Duration took = TakeUp(gpu.place());
  EXPECT_GE(took, absl::Milliseconds(300));
  EXPECT_TRUE(former.Ended());
}

// The kernel closes the descriptors of a process when its threads run no more.
TEST_F(JobCustodyTest, OnCpusNobodyIsAwaited) {
  testing::Child former([] {
    absl::SleepFor(absl::Seconds(60));
    return 0;
  });
  Leave(former.pid());
  EXPECT_LT(TakeUp({}), absl::Seconds(5));
}

TEST_F(JobCustodyTest, ALivingFormerDaemonIsNamedAndKeepsItsJobs) {
  testing::Child former([] {
    absl::SleepFor(absl::Seconds(60));
    return 0;
  });
  Leave(former.pid());
  OneGpu gpu;
  const auto taken = JobCustody(Connect()).TakeUp(/*on_gpus=*/true);
  EXPECT_EQ(taken.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(taken.status().message()),
              ::testing::HasSubstr("the daemon before has not ended within 10s"));
  former.Kill(SIGKILL);
  former.Wait();
  const auto then = JobCustody(Connect()).TakeUp(/*on_gpus=*/true);
  ASSERT_TRUE(then.ok()) << then.status();
  EXPECT_EQ(then->size(), 1u);
}

}  // namespace
}  // namespace shardd
