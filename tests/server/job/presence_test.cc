// Gradients that trainers drop or write between backward and step.

#include "tests/server/job/gradients_fixture.h"

namespace shardd {
namespace {

class PresenceTest : public GradientsTest {
 protected:
  using GradientsTest::GradientsTest;
  // One backward of all ranks whose gradients are the mean of 2 and 4.
  void BackwardOfAll(bool fresh = false) {
    Backward(0, 2, fresh);
    Backward(1, 4, fresh);
    AwaitAdded(0, kA);
    AwaitAdded(1, kA);
    AwaitAdded(0, kB);
  }
  void Give(int rank, int group, float value) {
    float* const part = Gradient(group) + rank * kNumel / 2;
    std::fill(part, part + kNumel / 2, value);
    Say(rank, group, true);
  }
};

TEST_F(PresenceTest, DroppedByAllIsNoUpdateNoDecayAndNoPartOfTheNorm) {
  std::fill_n(Shard(kA), kNumel, 1.0f);
  std::fill_n(Shard(kB), kNumel, 1.0f);
  BackwardOfAll();
  Say(0, kB, false);
  Say(1, kB, false);
  StepAll(1, /*weight_decay=*/0.5, /*max_grad_norm=*/3);
  EXPECT_EQ(First(kB), 1);
  EXPECT_EQ(Last(kB), 1);
  EXPECT_NEAR(First(kA), 1 - 0.5f - 3.0f / std::sqrt(64), 1e-5) << "clipped by its own norm, 24";
}

TEST_F(PresenceTest, DroppedByOneRankCountsAsZeroInItsPart) {
  std::fill_n(Shard(kB), kNumel, 1.0f);
  BackwardOfAll();
  Say(0, kB, false);
  StepAll(1, /*weight_decay=*/0.5);
  EXPECT_EQ(First(kB), 0.5f) << "decayed only";
  EXPECT_EQ(Last(kB), 0.5f - 3);
}

TEST_F(PresenceTest, GivenWithoutAnyBackwardIsUsed) {
  Give(0, kA, 5);
  Give(1, kA, 7);
  StepAll(1);
  EXPECT_EQ(First(kA), -5) << "a shard is written by its owner and divided by nothing";
  EXPECT_EQ(Last(kA), -7);
  EXPECT_EQ(First(kB), 0);
}

TEST_F(PresenceTest, GivenByOneRankIsZeroInTheOthersParts) {
  std::fill_n(Gradient(kA), kNumel, 99.0f);  // of no meaning
  Give(1, kA, 7);
  StepAll(1);
  EXPECT_EQ(First(kA), 0);
  EXPECT_EQ(Last(kA), -7);
}

TEST_F(PresenceTest, GivenBeforeABackwardIsAddedTo) {
  Give(0, kA, 5);
  Give(1, kA, 7);
  BackwardOfAll();
  StepAll(1);
  EXPECT_EQ(First(kA), -8);
  EXPECT_EQ(Last(kA), -10);
  EXPECT_EQ(First(kB), -3);
}

TEST_F(PresenceTest, GivenByOneRankBeforeABackwardIsAddedToThereOnly) {
  std::fill_n(Gradient(kA), kNumel, 99.0f);
  Give(0, kA, 5);
  BackwardOfAll();
  StepAll(1);
  EXPECT_EQ(First(kA), -8);
  EXPECT_EQ(Last(kA), -3);
}

TEST_F(PresenceTest, FreshGradientsReplaceWhatWasGiven) {
  Give(0, kA, 5);
  Give(1, kA, 5);
  BackwardOfAll(/*fresh=*/true);
  StepAll(1);
  EXPECT_EQ(First(kA), -3);
}

TEST_F(PresenceTest, DroppedBeforeABackwardIsReplacedByIt) {
  BackwardOfAll();
  Say(0, kB, false);
  Say(1, kB, false);
  BackwardOfAll();
  StepAll(1);
  EXPECT_EQ(First(kB), -3);
  EXPECT_EQ(First(kA), -6);
}

TEST_F(PresenceTest, LastWordCounts) {
  BackwardOfAll();
  for (bool present : {false, true, false}) {
    Say(0, kA, present);
    Say(1, kA, present);
    Say(0, kB, !present);
    Say(1, kB, !present);
  }
  StepAll(1);
  EXPECT_EQ(First(kA), 0);
  EXPECT_EQ(First(kB), -3);
}

TEST_F(PresenceTest, RankThatIsAheadSpeaksOfItsOwnPlaceInTheStep) {
  Backward(0, 2);
  Say(0, kB, false);  // after a backward that rank 1 has not begun
  Backward(1, 4);
  AwaitAdded(1, kB);
  StepAll(1);
  EXPECT_EQ(First(kB), 0) << "dropped after the reduction, not before it";
  EXPECT_EQ(Last(kB), -3);
}

TEST_F(PresenceTest, WhatWasSaidOfOneStepSaysNothingOfTheNext) {
  BackwardOfAll();
  Say(0, kB, false);
  Say(1, kB, false);
  StepAll(1);
  BackwardOfAll();
  StepAll(2);
  EXPECT_EQ(First(kB), -3);
}

TEST_F(PresenceTest, InAnOpenBackwardItIsRefused) {
  Submit(0, kB, 1);
  Say(0, kB, false);
  ASSERT_FALSE(Alive());
  EXPECT_NE(Error().find("SetGradientPresence \"b.w\""), std::string::npos) << Error();
  EXPECT_NE(Error().find("call BackwardDone first"), std::string::npos) << Error();
}

TEST_F(PresenceTest, AfterStepItIsRefused) {
  Step(0);
  Say(0, kB, false);
  ASSERT_FALSE(Alive());
  EXPECT_NE(Error().find("the step is being committed"), std::string::npos) << Error();
}

TEST_F(PresenceTest, ParameterOutOfRangeIsRefused) {
  v1::Command command;
  command.mutable_set_gradient_presence()->set_param(3);
  Send(0, command);
  ASSERT_FALSE(Alive());
  EXPECT_NE(Error().find("no such parameter (got 3, want 0 to 2)"), std::string::npos) << Error();
}

TEST_F(PresenceTest, AfterAnAbandonedBackwardAllDroppedAndDoneAgainItLeavesNoTrace) {
  for (int rank = 0; rank < kRanks; ++rank) {
    Submit(rank, kB, 100);
  }
  AwaitAdded(0, kB);
  for (int rank = 0; rank < kRanks; ++rank) {
    Abandon(rank);
    Say(rank, kB, false);
  }
  BackwardOfAll();
  StepAll(1);
  EXPECT_EQ(First(kB), -3);
}

class FrozenPresenceTest : public PresenceTest {
 protected:
  static SpecBuilder Frozen() {
    SpecBuilder builder = TwoGroups();
    ParamOptions options;
    options.requires_grad = false;
    builder.Param(1, "frozen", {4}, options);
    return builder;
  }
  FrozenPresenceTest() : PresenceTest(Frozen()) {}
};

TEST_F(FrozenPresenceTest, FrozenParameterIsRefusedByName) {
  v1::Command command;
  command.mutable_set_gradient_presence()->set_param(plan_->FindParam("a.frozen"));
  Send(0, command);
  ASSERT_FALSE(Alive());
  EXPECT_NE(Error().find("\"a.frozen\": the parameter is frozen"), std::string::npos) << Error();
}

// Every rank owns everything: what one of them gives is the gradient.
class ReplicatedPresenceTest : public PresenceTest {
 protected:
  static SpecBuilder Replicated() {
    SpecBuilder builder = TwoGroups();
    builder.config().set_strategy(v1::STRATEGY_NO_SHARD);
    return builder;
  }
  ReplicatedPresenceTest() : PresenceTest(Replicated()) {}
};

TEST_F(ReplicatedPresenceTest, WhatARankGivesIsNotZeroedForAnother) {
  std::fill_n(Gradient(kA), kNumel, 5.0f);
  Say(1, kA, true);
  StepAll(1);
  EXPECT_EQ(First(kA), -5);
  EXPECT_EQ(Last(kA), -5);
}

}  // namespace
}  // namespace shardd
