#include "common/figures/figures.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace shardd {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;

constexpr int64_t kMs = 1'000'000;

// After so many steps of 100 ms, of each of which every other rank spent 40 ms waiting for rank 2.
v1::JobMetrics After(int steps, int world_size = 4) {
  v1::JobMetrics job;
  job.set_world_size(world_size);
  v1::StepMetrics& of = *job.mutable_steps();
  of.set_committed(steps);
  of.mutable_duration()->add_counts(static_cast<uint64_t>(steps));
  of.mutable_duration()->set_sum_ns(steps * 100 * kMs);
  of.mutable_forward()->set_sum_ns(steps * 20 * kMs);
  of.mutable_waiting()->set_sum_ns(steps * 30 * kMs);
  of.mutable_commit()->set_sum_ns(steps * 50 * kMs);
  for (int rank = 0; rank < world_size; ++rank) {
    if (rank == 2) continue;
    v1::RankWait& wait = *job.add_waits();
    wait.set_rank(rank);
    wait.set_awaited(2);
    wait.set_wait_ns(steps * 40 * kMs);
  }
  if (steps > 0) {
    of.mutable_last()->set_step(steps);
    of.mutable_last()->set_duration_ns(200 * kMs);
    of.mutable_last()->set_backward_ns(80 * kMs);
    of.mutable_last()->set_slowest_rank(1);
    of.mutable_last()->set_slowest_rank_ns((world_size - 1) * 20 * kMs);
  }
  return job;
}

TEST(FiguresTest, StepsBetweenTwoAnswersAreTheMean) {
  const v1::JobMetrics before = After(10);
  const JobFigures figures = FiguresOf(After(14), &before);
  EXPECT_DOUBLE_EQ(figures.step_s, 0.1);
  EXPECT_DOUBLE_EQ(figures.steps_per_s, 10);
  EXPECT_THAT(figures.phases_s, ElementsAre(DoubleNear(0.02, 1e-9), 0, DoubleNear(0.03, 1e-9), 0, 0, 0.05));
}

TEST(FiguresTest, TheSlowestRankHasTheShareOfTheOthersTime) {
  const v1::JobMetrics before = After(10);
  const JobFigures figures = FiguresOf(After(14), &before);
  EXPECT_EQ(figures.slowest.rank, 2);
  EXPECT_DOUBLE_EQ(figures.slowest.share, 0.4);
  EXPECT_THAT(figures.awaited, ElementsAre(0, 0, 0.4, 0));
}

TEST(FiguresTest, TheLastStepCountsWithoutANewOne) {
  const v1::JobMetrics same = After(14), more = After(20), another = After(3, 3);
  for (const v1::JobMetrics* before : {static_cast<const v1::JobMetrics*>(nullptr), &same, &more, &another}) {
    const JobFigures figures = FiguresOf(After(14), before);
    EXPECT_DOUBLE_EQ(figures.step_s, 0.2);
    EXPECT_DOUBLE_EQ(figures.phases_s[1], 0.08);
    EXPECT_EQ(figures.slowest.rank, 1);
    EXPECT_DOUBLE_EQ(figures.slowest.share, 0.1);
    EXPECT_THAT(figures.awaited, ElementsAre(0, 0.1, 0, 0));
  }
}

TEST(FiguresTest, OfRanksThatShareACountTheLastIsNamed) {
  v1::JobMetrics before = After(10, 1000), now = After(14, 1000);
  for (v1::JobMetrics* job : {&before, &now}) {
    job->clear_waits();
    v1::RankWait& wait = *job->add_waits();
    wait.set_rank(-1);
    wait.set_awaited(-1);
    wait.set_wait_ns(job->steps().committed() * 999 * 25 * kMs);
  }
  now.mutable_steps()->mutable_last()->set_slowest_rank(700);
  const JobFigures figures = FiguresOf(now, &before);
  EXPECT_EQ(figures.slowest.rank, 700);
  EXPECT_DOUBLE_EQ(figures.slowest.share, 0.25);
  EXPECT_EQ(figures.awaited[700], 0);
}

TEST(FiguresTest, AStepThatTakesLongerLowersThePace) {
  v1::JobMetrics now = After(14);
  now.mutable_time()->set_since_commit_ns(4000 * kMs);
  EXPECT_DOUBLE_EQ(FiguresOf(now, nullptr).steps_per_s, 0.25);
}

TEST(FiguresTest, AJobWithoutAStepHasNone) {
  const JobFigures figures = FiguresOf(After(0), nullptr);
  EXPECT_LT(figures.step_s, 0);
  EXPECT_EQ(figures.steps_per_s, 0);
  EXPECT_EQ(figures.slowest.rank, -1);
}

TEST(FiguresTest, GoodputIsWhatStandsOfWhatIsOver) {
  v1::JobTime time;
  EXPECT_LT(GoodputOf(time), 0);
  time.set_running_ns(100);
  EXPECT_LT(GoodputOf(time), 0);
  time.set_committed_ns(80);
  EXPECT_EQ(GoodputOf(time), 1);
  time.set_taken_back_ns(20);
  time.set_absent_ns(20);
  EXPECT_EQ(GoodputOf(time), 0.6);
}

}  // namespace
}  // namespace shardd
