#include "server/job/meter/goodput.h"

#include <gtest/gtest.h>

#include "server/job/step/committed.h"

namespace shardd {
namespace {

constexpr auto kMs = [](int64_t ms) { return absl::UnixEpoch() + absl::Milliseconds(ms); };

class GoodputTest : public ::testing::Test {
 protected:
  void Commit(int64_t step, int64_t at_ms, int64_t for_one_ms = 0) {
    goodput_.Committed(step, absl::Milliseconds(for_one_ms), /*updated=*/true, kMs(at_ms));
  }
  void Look(int64_t at_ms) {
    time_.Clear();
    steps_.Clear();
    goodput_.Describe(kMs(at_ms), &time_, &steps_);
    const int64_t sum = time_.starting_ns() + time_.committed_ns() + time_.slow_rank_ns() + time_.dropped_ns() +
                        time_.absent_ns() + time_.idle_ns() + time_.running_ns();
    EXPECT_EQ(sum, at_ms * 1'000'000) << "every moment counts once";
  }
  static int64_t Ms(int64_t ns) { return ns / 1'000'000; }

  Goodput goodput_{kMs(0)};
  v1::JobTime time_;
  v1::StepMetrics steps_;
};

TEST_F(GoodputTest, AStepIsFromCommitToCommit) {
  Look(40);
  EXPECT_EQ(Ms(time_.starting_ns()), 40);
  EXPECT_EQ(time_.since_commit_ns(), -1);
  goodput_.Begin(kMs(50));
  Commit(1, 150);
  Commit(2, 220, /*for_one_ms=*/20);
  Look(230);
  EXPECT_EQ(Ms(time_.starting_ns()), 50);
  EXPECT_EQ(Ms(time_.committed_ns()), 150);
  EXPECT_EQ(Ms(time_.slow_rank_ns()), 20);
  EXPECT_EQ(Ms(time_.running_ns()), 10);
  EXPECT_EQ(Ms(time_.since_commit_ns()), 10);
  EXPECT_EQ(steps_.committed(), 2);
}

TEST_F(GoodputTest, DroppedWorkIsWhatCameBehindTheLastCommit) {
  goodput_.Begin(kMs(0));
  Commit(1, 100);
  goodput_.EpochEnds(/*dropped=*/true, kMs(170));
  goodput_.EpochEnds(/*dropped=*/true, kMs(175));  // of an epoch in which not all ranks came
  Look(300);
  EXPECT_EQ(Ms(time_.dropped_ns()), 70);
  EXPECT_EQ(Ms(time_.absent_ns()), 130);
  EXPECT_EQ(steps_.dropped(), 1);
  goodput_.Begin(kMs(400));
  Commit(2, 500);
  Commit(3, 600);
  Look(600);
  EXPECT_EQ(Ms(time_.dropped_ns()), 70);
  EXPECT_EQ(Ms(time_.absent_ns()), 230);
  EXPECT_EQ(Ms(time_.redone_ns()), 100) << "step 2, which was begun before; step 3 was not";
}

TEST_F(GoodputTest, AnEpochThatEndsOutsideOfAStepDropsNothing) {
  goodput_.Begin(kMs(0));
  Commit(1, 100);
  goodput_.EpochEnds(/*dropped=*/false, kMs(130));
  goodput_.Begin(kMs(150));
  Commit(2, 250);
  Look(250);
  EXPECT_EQ(Ms(time_.idle_ns()), 30);
  EXPECT_EQ(Ms(time_.dropped_ns() + time_.redone_ns()), 0);
}

TEST_F(GoodputTest, StepsThatAreTakenBackAreDoneAnew) {
  goodput_.Begin(kMs(0));
  Commit(1, 100);
  Commit(2, 300);
  Commit(3, 350);
  goodput_.EpochEnds(/*dropped=*/true, kMs(360));
  goodput_.TakenBack(1);
  goodput_.TakenBack(1);
  Look(360);
  EXPECT_EQ(Ms(time_.taken_back_ns()), 250) << "steps 2 and 3";
  EXPECT_EQ(steps_.taken_back(), 2);
  EXPECT_EQ(steps_.committed(), 3) << "a counter only grows";
  goodput_.Begin(kMs(360));
  for (int step = 2; step <= 5; ++step) Commit(step, 360 + 10 * (step - 1));
  Look(400);
  EXPECT_EQ(Ms(time_.redone_ns()), 30) << "2 and 3, and 4 of which work was dropped";
}

TEST_F(GoodputTest, ForgottenStepsCountWithTheMeanOfTheOthers) {
  goodput_.Begin(kMs(0));
  const int64_t steps = Goodput::kRemembered + 10;
  for (int64_t step = 1; step <= steps; ++step) Commit(step, 10 * step);
  goodput_.TakenBack(0);
  Look(10 * steps);
  EXPECT_EQ(steps_.taken_back(), steps);
  EXPECT_EQ(Ms(time_.taken_back_ns()), 10 * steps);
}

TEST_F(GoodputTest, StepsOfADaemonBeforeAreNotKnown) {
  goodput_.Begin(kMs(0));
  Commit(1001, 100);
  goodput_.TakenBack(990);
  Look(100);
  EXPECT_EQ(Ms(time_.taken_back_ns()), 100) << "the one that was made here";
  EXPECT_EQ(Ms(time_.committed_ns()), 100);
}

TEST_F(GoodputTest, ASkippedStepIsCountedApart) {
  goodput_.Begin(kMs(0));
  goodput_.Committed(1, absl::ZeroDuration(), /*updated=*/false, kMs(10));
  Look(10);
  EXPECT_EQ(steps_.skipped(), 1);
  EXPECT_EQ(steps_.committed(), 0);
}

}  // namespace
}  // namespace shardd
