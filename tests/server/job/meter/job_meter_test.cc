// What a job's time went into, by the job's own clock.

#include "server/job/meter/job_meter.h"

#include <gmock/gmock.h>

#include <string>

#include "absl/time/clock.h"
#include "server/storage/journal.h"
#include "tests/server/job/job_core_fixture.h"

namespace shardd {
namespace {

class JobMeterTest : public JobCoreTest {
 protected:
  v1::JobMetrics Metrics() {
    v1::JobMetrics metrics;
    OnLoop([&] { job_->view().DescribeMetrics(&metrics); });
    return metrics;
  }
  void TrainAll(int64_t step) {
    for (int rank = 0; rank < kRanks; ++rank) Train(rank);
    ASSERT_TRUE(Until([&] { return job_->committed().step() == step; }));
  }
  static std::string WaitsOf(const v1::JobMetrics& metrics) {
    std::string all;
    for (const v1::RankWait& wait : metrics.waits()) all += wait.ShortDebugString() + "\n";
    return all;
  }
  void LoseRank(int rank) {
    OnLoop([&] { job_->SessionLost(rank, "its process ended"); });
  }
};

TEST_F(JobMeterTest, CommittedStepsAreCountedWithTheirPhases) {
  TrainAll(1);
  TrainAll(2);
  const v1::JobMetrics metrics = Metrics();
  EXPECT_EQ(metrics.steps().committed(), 2);
  EXPECT_EQ(metrics.committed_step(), 2);
  EXPECT_EQ(metrics.steps().last().step(), 2);
  EXPECT_GT(metrics.steps().last().backward_ns(), 0);
  EXPECT_GT(metrics.steps().last().optimizer_ns(), 0);
  EXPECT_GT(metrics.time().committed_ns() + metrics.time().slow_rank_ns(), 0);
  EXPECT_EQ(metrics.time().dropped_ns(), 0);
  EXPECT_EQ(metrics.reductions().sum_ns() > 0, true) << metrics.reductions().ShortDebugString();
  EXPECT_EQ(metrics.ranks_size(), kRanks);
  EXPECT_EQ(metrics.ranks(0).state(), v1::RANK_STATE_IDLE);
  EXPECT_GE(metrics.ranks(0).last_heard_ns(), 0);
  EXPECT_EQ(metrics.collective(), "local");
}

TEST_F(JobMeterTest, TheSlowRankIsNamed) {
  Train(0);
  const absl::Time begin = absl::Now();
  ASSERT_TRUE(testing::PollUntil([&] { return absl::Now() - begin >= absl::Milliseconds(50); }, kPatience));
  Train(1);
  ASSERT_TRUE(Until([&] { return job_->committed().step() == 1; }));
  const v1::JobMetrics metrics = Metrics();
  ASSERT_EQ(metrics.waits_size(), 1) << metrics.ShortDebugString();
  EXPECT_EQ(metrics.waits(0).rank(), 0);
  EXPECT_EQ(metrics.waits(0).awaited(), 1);
  EXPECT_GE(metrics.waits(0).wait_ns(), 50'000'000);
  EXPECT_GE(metrics.time().slow_rank_ns(), 50'000'000);
  EXPECT_EQ(metrics.steps().last().slowest_rank(), 1);
  EXPECT_GE(metrics.steps().last().slowest_rank_ns(), 50'000'000);
  EXPECT_LE(metrics.steps().last().slowest_rank_ns(), metrics.waits(0).wait_ns())
      << "initial values were waited for, too";
}

TEST_F(JobMeterTest, ALostRankDropsWhatCameBehindTheCommit) {
  TrainAll(1);
  const std::string waits = WaitsOf(Metrics());
  Train(0);
  LoseRank(1);
  v1::JobMetrics metrics = Metrics();
  EXPECT_EQ(metrics.steps().dropped(), 1);
  EXPECT_GT(metrics.time().dropped_ns(), 0);
  EXPECT_EQ(metrics.time().running_ns(), 0);
  EXPECT_EQ(WaitsOf(metrics), waits) << "rank 1 did not come";
  ASSERT_EQ(metrics.interruptions_size(), 1);
  EXPECT_EQ(metrics.interruptions(0).cause(), v1::INTERRUPTION_CAUSE_RANK_LOST);
  EXPECT_EQ(metrics.ranks(1).state(), v1::RANK_STATE_ABSENT);
  EXPECT_EQ(metrics.ranks(1).last_heard_ns(), -1);
  const int64_t dropped = metrics.time().dropped_ns();
  Attach(0);
  Attach(1);
  TrainAll(2);
  metrics = Metrics();
  EXPECT_EQ(metrics.time().dropped_ns(), dropped);
  EXPECT_GT(metrics.time().absent_ns(), 0);
  EXPECT_GT(metrics.time().redone_ns(), 0);
}

TEST_F(JobMeterTest, AnEndBetweenStepsDropsNothing) {
  TrainAll(1);
  LoseRank(0);
  const v1::JobMetrics metrics = Metrics();
  EXPECT_EQ(metrics.steps().dropped(), 0);
  EXPECT_EQ(metrics.time().dropped_ns(), 0);
  EXPECT_GT(metrics.time().idle_ns(), 0);
}

TEST_F(JobMeterTest, ADecidedStepIsNotDroppedByADeath) {
  TrainUntilDecided();
  LoseRank(1);
  Release();
  ASSERT_TRUE(Until([&] { return job_->committed().step() == 1 && job_->sessions().attached() == 0; }));
  const v1::JobMetrics metrics = Metrics();
  EXPECT_EQ(metrics.steps().committed(), 1);
  EXPECT_EQ(metrics.time().dropped_ns(), 0) << metrics.time().ShortDebugString();
}

TEST_F(JobMeterTest, WhatARankMustNotDoIsItsMistake) {
  v1::Command command;
  command.mutable_step();  // without hyperparameters
  Send(0, command);
  const v1::JobMetrics metrics = Metrics();
  ASSERT_EQ(metrics.interruptions_size(), 1);
  EXPECT_EQ(metrics.interruptions(0).cause(), v1::INTERRUPTION_CAUSE_MISTAKE);
}

}  // namespace
}  // namespace shardd
