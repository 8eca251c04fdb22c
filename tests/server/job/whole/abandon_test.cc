// A rank whose user code failed between the begin of its forward and the end of its backward goes back alone.

#include "tests/server/job/gradients_fixture.h"

namespace shardd {
namespace {

using AbandonTest = GradientsTest;

TEST_F(AbandonTest, UnreducedGradientsAreTakenBackAndSubmittedAgain) {
  const uint64_t before = epoch();
  Submit(0, kB, 10);
  Abandon(0);
  AwaitAdded(0, kB);  // its slot is free at once
  Backward(0, 2);
  Backward(1, 4);
  StepAll(1);
  EXPECT_EQ(First(kB), -3);
  EXPECT_EQ(First(kA), -3);
  EXPECT_EQ(epoch(), before) << "nobody was troubled";
  EXPECT_EQ(Counters().abandons(), 1u);
}

TEST_F(AbandonTest, ReducedGradientsStayAndStandForTheSecondSubmission) {
  Backward(1, 4);
  Step(1);  // the other one is far ahead and waits
  Submit(0, kB, 10);
  AwaitAdded(0, kB);
  Abandon(0);
  Backward(0, 2);
  Step(0);
  ASSERT_TRUE(Until([&] { return job_->view().committed_step() == 1; })) << Error();
  EXPECT_EQ(First(kB), -7) << "each rank counts once";
  EXPECT_EQ(First(kA), -3);
}

TEST_F(AbandonTest, OneRanksSecondTryReplacesNothingOfOthers) {
  Backward(1, 4, /*fresh=*/true);
  Submit(0, kB, 10, /*fresh=*/true);
  AwaitAdded(0, kB);
  Abandon(0);
  Backward(0, 2, /*fresh=*/true);
  StepAll(1);
  EXPECT_EQ(First(kB), -7);
  EXPECT_EQ(First(kA), -3);
}

TEST_F(AbandonTest, ABackwardThatFailedEverywhereLeavesNoTraceWhenRepeated) {
  Backward(0, 32);
  Backward(1, 32);
  for (int rank = 0; rank < kRanks; ++rank) {
    Submit(rank, kB, 100);
  }
  AwaitAdded(0, kB);
  for (int rank = 0; rank < kRanks; ++rank) {
    Abandon(rank);
  }
  Backward(0, 2, /*fresh=*/true);
  Backward(1, 4, /*fresh=*/true);
  StepAll(1);
  EXPECT_EQ(First(kB), -3);
  EXPECT_EQ(First(kA), -3);
}

TEST_F(AbandonTest, BackwardThatFailedEverywhereCountsOnceWhereGradientsAdd) {
  Backward(0, 32);
  Backward(1, 32);
  for (int rank = 0; rank < kRanks; ++rank) {
    Submit(rank, kB, 1);
  }
  AwaitAdded(0, kB);
  for (int rank = 0; rank < kRanks; ++rank) {
    Abandon(rank);
  }
  Backward(0, 2);
  Backward(1, 2);
  StepAll(1);
  EXPECT_EQ(First(kB), -33) << "the first try of both";
  EXPECT_EQ(First(kA), -34) << "the second";
}

TEST_F(AbandonTest, ClosingTheBackwardWithoutItsGradientsIsNoMissingContribution) {
  Backward(1, 4);
  Unshard(0, kA, v1::PHASE_FORWARD);
  Abandon(0);
  Done(0);
  StepAll(1);
  EXPECT_EQ(First(kB), -2);
  EXPECT_EQ(First(kA), -2);
}

TEST_F(AbandonTest, StepMayFollowAtOnce) {
  Backward(1, 4);
  Submit(0, kB, 10);
  AwaitAdded(0, kB);
  Abandon(0);
  StepAll(1);
  EXPECT_EQ(First(kB), -7);
  EXPECT_EQ(First(kA), -2);
}

TEST_F(AbandonTest, AGroupMissingFromTheSecondTryIsAnError) {
  Backward(1, 4);
  Submit(0, kB, 10);
  Abandon(0);
  Submit(0, kB, 2);
  Done(0);
  ASSERT_FALSE(Alive());
  EXPECT_NE(Error().find("rank 0 closed backward 0 without SubmitGradients for group \"a\""), std::string::npos)
      << Error();
}

TEST_F(AbandonTest, RankThatGivesUpTwiceCountsOnce) {
  Backward(1, 4);
  for (float value : {10.0f, 20.0f}) {
    Submit(0, kB, value);
    AwaitAdded(0, kB);
    Abandon(0);
  }
  Backward(0, 2);
  StepAll(1);
  EXPECT_EQ(First(kB), -7);
  EXPECT_EQ(First(kA), -3);
}

TEST_F(AbandonTest, EarlierBackwardsKeepWhatTheyHave) {
  Backward(0, 2);
  Backward(1, 4);
  Submit(0, kB, 10);
  Abandon(0);
  Backward(0, 2);
  Backward(1, 4);
  StepAll(1);
  EXPECT_EQ(First(kB), -6);
  EXPECT_EQ(First(kA), -6);
}

TEST_F(AbandonTest, EveryGroupIsShardedWhoeverHeldIt) {
  Unshard(0, 0, v1::PHASE_FORWARD);
  Unshard(0, kA, v1::PHASE_FORWARD);
  Unshard(0, kA, v1::PHASE_FORWARD);
  Unshard(0, kB);
  Abandon(0);
  OnLoop([&] {
    for (const Handle& handle : job_->sessions()[0].get()->handles) {
      EXPECT_EQ(handle.DebugString(), "SHARDED/IDLE");
    }
  });
  Step(0);
  EXPECT_TRUE(Alive()) << "Step needs all groups resharded";
}

TEST_F(AbandonTest, AfterStepOnlyTheNextForwardIsGivenUp) {
  Backward(0, 2);
  Step(0);
  Unshard(0, kA, v1::PHASE_FORWARD);
  Abandon(0);
  Backward(1, 4);
  Step(1);
  ASSERT_TRUE(Until([&] { return job_->view().committed_step() == 1; })) << Error();
  EXPECT_EQ(First(kA), -3);
  Backward(0, 2);
  Backward(1, 4);
  StepAll(2);
  EXPECT_EQ(First(kA), -6);
}

TEST_F(AbandonTest, InsideFullParametersItIsAnError) {
  v1::Command command;
  command.mutable_enter_full_params();
  Send(0, command);
  Abandon(0);
  ASSERT_FALSE(Alive());
  EXPECT_NE(Error().find("Abandon"), std::string::npos) << Error();
}

TEST_F(AbandonTest, RankThatFallsSilentAfterwardsIsNamedAtTheDeadline) {
  Backward(1, 4);
  Step(1);
  Submit(0, kB, 10);
  Abandon(0);
  const absl::Duration limit = absl::Milliseconds(plan_->config.silence_timeout_ms());
  OnLoop([&] { job_->CheckSilence(MonotonicNow() + limit + absl::Seconds(1)); });
  ASSERT_FALSE(Alive());
  EXPECT_NE(Error().find("rank 0 has sent nothing"), std::string::npos) << Error();
}

TEST_F(AbandonTest, AGroupSubmittedTwiceInTheSecondTryCountsTwice) {
  for (float value : {100.0f, 200.0f}) {
    for (int rank = 0; rank < kRanks; ++rank) {
      Submit(rank, kB, value);
    }
  }
  AwaitAdded(0, kB);
  for (int rank = 0; rank < kRanks; ++rank) {
    Abandon(rank);
  }
  for (bool fresh : {true, false}) {
    Submit(0, kB, 2, fresh);
    Submit(1, kB, 4, fresh);
  }
  Done(0);
  Done(1);
  StepAll(1);
  EXPECT_EQ(First(kB), -6);
}

TEST_F(AbandonTest, SomeAreToldAndAllAreCounted) {
  const auto told = [this] {
    const std::vector<v1::Event> events = events_.List("job", 1000);
    return std::count_if(events.begin(), events.end(), [](const v1::Event& e) { return e.kind() == "abandon"; });
  };
  for (int time = 0; time < 20; ++time) {
    Abandon(0);
  }
  EXPECT_EQ(told(), 0) << "nothing was given up";
  for (int time = 0; time < 20; ++time) {
    Submit(0, kB, 1);
    Abandon(0);
  }
  EXPECT_EQ(told(), 8);
  EXPECT_EQ(Counters().abandons(), 40u);
}

TEST_F(AbandonTest, ASecondTryThatWaitsNamesTheAwaitedBackwardsEnd) {
  for (int group : {kB, kA}) {
    Submit(1, group, 4);
    Submit(0, group, 10);
  }
  AwaitAdded(0, kB);
  AwaitAdded(0, kA);
  Abandon(0);
  Backward(0, 2);
  v1::ListRanksResponse ranks;
  OnLoop([&] { job_->view().DescribeRanks(&ranks); });
  EXPECT_EQ(ranks.ranks(0).waiting_for(), "rank 1: BackwardDone of backward 0");
}

class TwoParametersAbandonTest : public GradientsTest {
 protected:
  static SpecBuilder TwoParameters() {
    SpecBuilder builder = TwoGroups();
    builder.Param(1, "v", {kNumel});
    return builder;
  }
  TwoParametersAbandonTest() : GradientsTest(TwoParameters()) {}
  // Fresh gradients in group a; masks of w (1) and v (2).
  void SubmitAll(float value, char present) {
    for (int rank = 0; rank < kRanks; ++rank) {
      Submit(rank, kA, value, /*fresh=*/true, std::string(1, present));
    }
    AwaitAdded(0, kA);
  }
  void AbandonAll() {
    for (int rank = 0; rank < kRanks; ++rank) {
      Abandon(rank);
    }
  }
  void DoneAll() {
    for (int rank = 0; rank < kRanks; ++rank) {
      Done(rank);
    }
  }
  float V() { return Shard(kA)[kNumel]; }
};

TEST_F(TwoParametersAbandonTest, WhatTheSecondTryOfAllLeavesOutIsAbsent) {
  std::fill_n(Shard(kA), 2 * kNumel, 1.0f);
  SubmitAll(100, 3);
  AbandonAll();
  SubmitAll(2, 1);
  DoneAll();
  StepAll(1, /*weight_decay=*/0.5);
  EXPECT_EQ(First(kA), 0.5f - 2);
  EXPECT_EQ(V(), 1) << "no update and no decay";
}

TEST_F(TwoParametersAbandonTest, EarlierContributionsStayWhereTheSecondTryLeavesThemOut) {
  SubmitAll(5, 2);
  DoneAll();
  SubmitAll(100, 1);
  AbandonAll();
  SubmitAll(2, 1);
  DoneAll();
  StepAll(1);
  EXPECT_EQ(First(kA), -2);
  EXPECT_EQ(V(), -5);
}

class StrictAbandonTest : public GradientsTest {
 protected:
  static SpecBuilder Strict() {
    SpecBuilder builder = TwoGroups();
    builder.config().set_strict_order(true);
    return builder;
  }
  StrictAbandonTest() : GradientsTest(Strict()) {}
};

TEST_F(StrictAbandonTest, ASecondTryIsNoDepartureFromTheCapturedOrder) {
  for (int64_t step = 1; step <= 3; ++step) {
    for (int micro = 0; micro < 2; ++micro) {
      Unshard(step % 2, kA, v1::PHASE_FORWARD);
      Submit(step % 2, kB, 10);
      Abandon(step % 2);
      for (int rank = 0; rank < kRanks; ++rank) {
        Unshard(rank, kA, v1::PHASE_FORWARD);
        Reshard(rank, kA);
        Backward(rank, 2);
      }
    }
    StepAll(step);
  }
  EXPECT_EQ(Counters().departures(), 0u);
  EXPECT_EQ(First(kB), -12);
}

class PooledAbandonTest : public GradientsTest {
 protected:
  static SpecBuilder Pooled() {
    SpecBuilder builder = TwoGroups();
    for (const char* name : {"c", "d", "e", "f"}) {  // far more groups than a rank may hold
      builder.Param(builder.AddSharded(0, name), "w", {kNumel});
    }
    builder.config().set_unshard_mode(v1::UNSHARD_MODE_POOLED);
    builder.config().set_max_inflight_unshards(1);
    builder.config().set_strategy(v1::STRATEGY_FULL_SHARD);
    return builder;
  }
  PooledAbandonTest() : GradientsTest(Pooled()) {}
};

TEST_F(PooledAbandonTest, SlotsOfThePoolAreGivenBack) {
  const int groups = static_cast<int>(plan_->groups.size());
  ASSERT_LE(2 * plan_->pool_quota, groups) << "or what was held would do for the next time";
  for (int time = 0; time < 2; ++time) {
    for (int i = 0; i < plan_->pool_quota; ++i) {
      Unshard(0, time * plan_->pool_quota + i, v1::PHASE_FORWARD);
    }
    Abandon(0);
  }
  ASSERT_TRUE(Alive()) << Error();
  Backward(0, 2);
  Backward(1, 4);
  StepAll(1);
  EXPECT_EQ(First(kA), -3);
}

}  // namespace
}  // namespace shardd
