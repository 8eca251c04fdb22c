#include "client/fsdp/unit_life.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/client/fsdp/fake_shell.h"

namespace shardd::fsdp {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// A unit of groups 0 and 1 out of three, each with its own slot.
class UnitLifeTest : public ::testing::Test {
 protected:
  UnitLifeTest() { unit_.Bind(&lives_, {0, 1}); }
  void Ok(const Status& status) { EXPECT_TRUE(status.ok()) << status.message(); }
  void Write(int group) {
    Ok(lives_.PrepareGradients(group));
    lives_.MarkGradient(group, 0, /*fresh=*/false);
  }

  FakeShell shell_;
  GroupLives lives_{shell_, {1, 1, 1}, {0, 1, 2}};
  UnitLife unit_;
};

TEST_F(UnitLifeTest, AForwardBeginsOnceHoweverOftenItsModulesRun) {
  EXPECT_TRUE(unit_.BeginForward());
  EXPECT_FALSE(unit_.BeginForward());
  EXPECT_TRUE(unit_.in_forward());
  unit_.EndForward(/*has_backward=*/false);
  EXPECT_TRUE(unit_.BeginForward());
}

TEST_F(UnitLifeTest, OnlyAForwardWithABackwardOwesOne) {
  unit_.BeginForward();
  unit_.EndForward(/*has_backward=*/false);
  EXPECT_FALSE(unit_.ran_forward());
  unit_.BeginForward();
  unit_.EndForward(/*has_backward=*/true);
  EXPECT_TRUE(unit_.ran_forward());
  EXPECT_EQ(unit_.training(), Training::kIdle);
}

TEST_F(UnitLifeTest, WhatRunsInItsBackwardRecomputes) {
  EXPECT_TRUE(unit_.ReachBackward());
  unit_.BeginBackward();
  EXPECT_TRUE(unit_.recomputes());
  EXPECT_FALSE(unit_.ReachBackward());
  Ok(unit_.EndBackward());
  EXPECT_EQ(unit_.training(), Training::kPostBackward);
}

TEST_F(UnitLifeTest, OneThatIsUsedTwiceBeginsItsBackwardTwice) {
  unit_.ReachBackward();
  unit_.BeginBackward();
  Ok(unit_.EndBackward());
  EXPECT_TRUE(unit_.ReachBackward());
}

TEST_F(UnitLifeTest, ItsGroupsAreUnshardedTogetherAndOnce) {
  Ok(unit_.Unshard(SHARDD_FORWARD));
  Ok(unit_.Unshard(SHARDD_FORWARD));
  Ok(unit_.Wait());
  EXPECT_TRUE(unit_.held());
  Ok(unit_.ReshardAll());
  EXPECT_FALSE(unit_.held());
  EXPECT_THAT(shell_.Take(),
              ElementsAre("unshard 0 forward", "unshard 1 forward", "wait 0", "wait 1", "reshard 0", "reshard 1"));
}

TEST_F(UnitLifeTest, TheFirstGroupThatFailsEndsTheCall) {
  shell_.FailAt("unshard");
  EXPECT_TRUE(unit_.Unshard(SHARDD_BACKWARD).aborted());
  EXPECT_THAT(shell_.Take(), ElementsAre("unshard 0 backward"));
  EXPECT_FALSE(unit_.held());
}

TEST_F(UnitLifeTest, TheEndOfItsBackwardSubmitsWhatIsWritten) {
  Write(1);
  shell_.Take();
  Ok(unit_.EndBackward());
  EXPECT_THAT(shell_.Take(), ElementsAre("submit 1 present=1 fresh=0"));
}

TEST_F(UnitLifeTest, APartialBackwardLeavesTheForwardsDebt) {
  unit_.EndForward(/*has_backward=*/true);
  unit_.CloseBackward(/*whole=*/false, /*stays_unsharded=*/false);
  EXPECT_TRUE(unit_.ran_forward());
  unit_.CloseBackward(/*whole=*/true, /*stays_unsharded=*/false);
  EXPECT_FALSE(unit_.ran_forward());
}

TEST_F(UnitLifeTest, AnAbandonedBackwardSubmitsNothing) {
  Write(0);
  shell_.Take();
  unit_.AbandonBackward();
  Ok(unit_.EndBackward());
  EXPECT_THAT(shell_.Take(), IsEmpty());
}

TEST_F(UnitLifeTest, NothingOutlivesAnAttachment) {
  unit_.EndForward(/*has_backward=*/true);
  Ok(unit_.Unshard(SHARDD_FORWARD));
  unit_.ReachBackward();
  unit_.Forget();
  EXPECT_FALSE(unit_.held());
  EXPECT_FALSE(unit_.ran_forward());
  EXPECT_FALSE(unit_.recomputes());
}

TEST_F(UnitLifeTest, AUnitWithoutGroupsAsksForNothing) {
  unit_.Unbind();
  Ok(unit_.Unshard(SHARDD_FORWARD));
  Ok(unit_.EndBackward());
  EXPECT_FALSE(unit_.held());
  EXPECT_FALSE(unit_.ran_forward());
  EXPECT_THAT(shell_.Take(), IsEmpty());
}

}  // namespace
}  // namespace shardd::fsdp
