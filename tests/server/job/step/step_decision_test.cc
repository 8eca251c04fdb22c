#include "server/job/step/step_decision.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "server/job/step/committed.h"

namespace shardd {
namespace {

v1::Step Clipped(double max_norm, double loss_scale = 0) {
  v1::Step step;
  step.add_groups()->set_lr(0.5);
  step.set_max_grad_norm(max_norm);
  step.set_loss_scale(loss_scale);
  return step;
}

TEST(StepDecisionTest, AStepGoesThroughItsStates) {
  StepDecision decision;
  decision.AwaitDevices();
  EXPECT_TRUE(decision.awaits_devices());
  EXPECT_FALSE(decision.deciding() || decision.committing());
  decision.DevicesCame();
  decision.BeginMeasuring();
  EXPECT_TRUE(decision.deciding());
  EXPECT_FALSE(decision.decided() || decision.committing());
  decision.BeginUpdate();
  EXPECT_TRUE(decision.deciding() && decision.decided() && decision.committing());
  EXPECT_FALSE(decision.applied());
  decision.Applied();
  EXPECT_TRUE(decision.applied() && decision.committing());
  EXPECT_FALSE(decision.showing());
  decision.Show();
  EXPECT_TRUE(decision.showing() && decision.applied() && decision.committing());
  decision.End();
  EXPECT_FALSE(decision.deciding() || decision.committing() || decision.applied());
}

TEST(StepDecisionTest, AVersionThatNoStepMakesIsNoDecision) {
  StepDecision decision;
  decision.BeginCommit();
  EXPECT_TRUE(decision.committing());
  EXPECT_FALSE(decision.deciding() || decision.decided() || decision.applied());
  decision.EndEpoch();
  EXPECT_TRUE(decision.committing()) << "it completes forward";
  decision.End();
  EXPECT_FALSE(decision.committing());
}

TEST(StepDecisionTest, AnEpochThatEndsDropsWhatHasChangedNothing) {
  StepDecision decision;
  decision.AwaitDevices();
  decision.EndEpoch();
  EXPECT_FALSE(decision.awaits_devices());
  decision.BeginMeasuring();
  decision.EndEpoch();
  EXPECT_FALSE(decision.deciding());
  decision.BeginUpdate();
  decision.EndEpoch();
  EXPECT_TRUE(decision.decided());
}

TEST(StepDecisionTest, TheUpdateUsesTheClippedGradientWithoutLossScale) {
  StepDecision decision;
  const v1::Step step = Clipped(/*max_norm=*/1, /*loss_scale=*/8);
  decision.Measured(/*norm=*/32, step);
  decision.Fix(step, {true, false}, {3, 0});
  EXPECT_NEAR(decision.step().clip_factor, 0.25 / 8, 1e-6);
  EXPECT_EQ(decision.step().present, (std::vector<bool>{true, false}));
  ASSERT_EQ(decision.step().groups.size(), 1u);
  EXPECT_EQ(decision.step().groups[0].lr(), 0.5);
  v1::SessionEvent::Committed told;
  decision.Describe(&told);
  EXPECT_DOUBLE_EQ(told.grad_norm(), 4);
  EXPECT_NEAR(told.clip_factor(), 0.25, 1e-6);
  v1::DecidedStepRecord record;
  decision.Describe(&record);
  EXPECT_EQ(record.present(), std::string(1, '\1'));
  EXPECT_EQ(record.step_counts(0), 3);
  EXPECT_EQ(record.clip_factor(), decision.step().clip_factor);
}

TEST(StepDecisionTest, InfiniteGradientsSkipAStepOnlyUnderALossScale) {
  StepDecision decision;
  const double infinite = std::numeric_limits<double>::infinity();
  decision.Measured(infinite, Clipped(0, 8));
  decision.Fix(Clipped(0, 8), {true}, {0});
  EXPECT_EQ(decision.step().present, (std::vector<bool>{false}));
  v1::SessionEvent::Committed told;
  decision.Describe(&told);
  EXPECT_TRUE(told.skipped());
  EXPECT_EQ(told.clip_factor(), 0);
  decision.Measured(infinite, Clipped(0));
  decision.Fix(Clipped(0), {true}, {0});
  EXPECT_EQ(decision.step().present, (std::vector<bool>{true}));
}

TEST(StepDecisionTest, WhatNode0SaysIsWhatEveryNodeUpdatesWith) {
  const v1::Step step = Clipped(1);
  StepDecision node0;
  node0.Measured(10, step);
  node0.Fix(step, {true}, {7});
  v1::PeerMessage::Decided said;
  node0.Describe(&said);
  StepDecision other;
  other.Heard(said);
  other.Fix(step, {true}, {7});
  EXPECT_EQ(other.step().clip_factor, node0.step().clip_factor);
  other.BeginUpdate();
  EXPECT_FALSE(other.Applies(0));
  other.Applied();
  EXPECT_TRUE(other.Applies(0));
}

}  // namespace
}  // namespace shardd
