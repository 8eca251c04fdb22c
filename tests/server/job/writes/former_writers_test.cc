#include "server/job/writes/former_writers.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "server/job/membership/past_process.h"
#include "server/job/wait.h"
#include "tests/server/job/trainer_process.h"

namespace shardd {
namespace {

class FormerWritersTest : public ::testing::Test {
 protected:
  FormerWritersTest() { writers_.Begin(start_); }
  void Add(int rank, const TrainerProcess& trainer) { writers_.Add(rank, trainer.pid(), trainer.Descriptor()); }
  void Attach(int rank, int32_t pid, bool replace = false, absl::Duration after = absl::ZeroDuration(),
              bool on_devices = false) {
    EXPECT_EQ(writers_.Attaching(rank, pid, UniqueFd(), replace, on_devices, start_ + after), "");
  }
  const absl::Time start_ = absl::UnixEpoch() + absl::Hours(1);
  FormerWriters writers_{static_cast<uint32_t>(getuid())};
  TrainerProcess a_;
  TrainerProcess b_;
};

TEST_F(FormerWritersTest, EachProcessHasToAttachAgain) {
  Add(0, a_);
  Add(1, b_);
  EXPECT_TRUE(writers_.waiting());
  Attach(0, a_.pid());
  EXPECT_FALSE(writers_.none());
  Attach(1, b_.pid());
  EXPECT_TRUE(writers_.none());
  EXPECT_TRUE(writers_.waiting()) << "until the job goes back";
  writers_.StopWaiting();
  EXPECT_FALSE(writers_.waiting());
}

TEST_F(FormerWritersTest, OrToEnd) {
  Add(0, a_);
  a_.End();
  Attach(1, b_.pid());
  EXPECT_TRUE(writers_.none());
}

TEST_F(FormerWritersTest, AReplacedProcessIsKilled) {
  Add(0, a_);
  Attach(0, b_.pid(), /*replace=*/true);
  EXPECT_TRUE(a_.WasKilled());
  Attach(0, b_.pid(), /*replace=*/true);
  EXPECT_TRUE(writers_.none());
}

TEST_F(FormerWritersTest, AReplacingProcessThatWasLiveHasToAskTwice) {
  Add(0, a_);
  Attach(0, a_.pid(), /*replace=*/true);
  EXPECT_FALSE(writers_.none()) << "it has not given its session up yet";
  Attach(0, a_.pid(), /*replace=*/true);
  EXPECT_TRUE(writers_.none());
}

TEST_F(FormerWritersTest, OneRankSpeaksForItsProcessAfterAWhile) {
  Add(0, a_);
  Add(1, a_);
  Attach(0, a_.pid());
  Attach(0, a_.pid());
  EXPECT_EQ(writers_.Names(), absl::StrCat("rank 1 (pid ", a_.pid(), ")"));
  Attach(0, a_.pid(), false, FormerWriters::kMostWaitForOwnRanks, /*on_devices=*/true);
  EXPECT_FALSE(writers_.none()) << "another rank's stream may still store";
  Attach(0, a_.pid(), false, FormerWriters::kMostWaitForOwnRanks);
  EXPECT_TRUE(writers_.none());
}

// As where each trainer has a PID namespace of its own.
TEST_F(FormerWritersTest, WithoutPidsAnotherProcessIsNotWhoStored) {
  if (!CanBeTold(a_.Descriptor(), 0, b_.Descriptor(), 0)) GTEST_SKIP() << "before kernel 6.9 pidfds all look alike";
  writers_.Add(0, 0, a_.Descriptor());
  const auto attach = [this](const TrainerProcess& from) {
    return writers_.Attaching(0, 0, from.Descriptor(), /*replace=*/false, /*on_devices=*/false, start_);
  };
  EXPECT_EQ(attach(b_), "");
  EXPECT_EQ(writers_.Names(), "rank 0 (pid 0)");
  EXPECT_EQ(attach(a_), "");
  EXPECT_TRUE(writers_.none());
}

TEST_F(FormerWritersTest, TheNextEpochBeginsAnew) {
  Add(0, a_);
  writers_.Begin(start_);
  EXPECT_TRUE(writers_.none());
}

}  // namespace
}  // namespace shardd
