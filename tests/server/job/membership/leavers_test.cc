#include "server/job/membership/leavers.h"

#include <gtest/gtest.h>

#include "tests/server/job/facts_fixture.h"

namespace shardd {
namespace {

class LeaversTest : public FactsTest {};

TEST_F(LeaversTest, FinishedOutlivesTheEpochAndEndsWithTheNextAttach) {
  leavers_.Left(0, /*finished=*/true);
  leavers_.Defer(1, /*finished=*/true);
  leavers_.EndEpoch();
  EXPECT_TRUE(leavers_.finished(0));
  EXPECT_FALSE(leavers_.leaving(1)) << "its session is gone";
  EXPECT_FALSE(leavers_.all_finished());
  leavers_.Left(1, true);
  EXPECT_TRUE(leavers_.all_finished());
  leavers_.Came(0);
  EXPECT_FALSE(leavers_.finished(0));
}

TEST_F(LeaversTest, ARankLeavesInOrderBetweenWholeBackwards) {
  EXPECT_FALSE(leavers_.LeavesInOrder(0)) << "it has closed none";
  CloseBackward(0);
  EXPECT_TRUE(leavers_.LeavesInOrder(0));
  full_params_.Ask(1, {}, 0);
  EXPECT_FALSE(leavers_.LeavesInOrder(0)) << "another waits for all ranks";
}

TEST_F(LeaversTest, ARankThatBeganTheNextBackwardLeavesMidway) {
  CloseBackward(0);
  Submit(1);
  EXPECT_TRUE(leavers_.LeavesInOrder(0)) << "rank 1 is in the backward that rank 0 has closed";
  CloseBackward(1);
  Submit(0);
  EXPECT_FALSE(leavers_.LeavesInOrder(0));
}

TEST_F(LeaversTest, GradientsAreNeededUntilBackwardsCloseAndSumsEnd) {
  CloseBackward(0);
  EXPECT_TRUE(leavers_.OthersNeedGradientsOf(0, /*sums_under_way=*/false)) << "rank 1 has not closed";
  CloseBackward(1);
  EXPECT_FALSE(leavers_.OthersNeedGradientsOf(0, false));
  EXPECT_TRUE(leavers_.OthersNeedGradientsOf(0, /*sums_under_way=*/true));
}

TEST_F(LeaversTest, NobodyAwaitsAFinishedRankInBackwardsItClosed) {
  CloseBackward(0);
  leavers_.Left(0, true);
  EXPECT_TRUE(leavers_.CheckNobodyFinished(1, "SubmitGradients", /*backward=*/0).ok());
  ExpectRefused(leavers_.CheckNobodyFinished(1, "SubmitGradients", 1), "SubmitGradients: rank 0 has finished");
}

TEST_F(LeaversTest, ALeaverWithAStepIsStillThere) {
  steps_.Ask(0, {}, 0);
  leavers_.Defer(0, true);
  EXPECT_TRUE(leavers_.CheckNobodyFinished(1, "Step", kAllBackwards).ok());
  (void)steps_.TakeTrainerStates();
  ExpectRefused(leavers_.CheckNobodyFinished(1, "Step", kAllBackwards), "has finished");
}

TEST_F(LeaversTest, ReadersOfFullParametersAreNotMidway) {
  EXPECT_FALSE(leavers_.AnyMidway());
  full_params_.Ask(0, {}, 0);
  EXPECT_FALSE(leavers_.AnyMidway()) << "it needs nobody who has finished";
  full_params_.Ask(1, {}, 0);
  full_params_.Grant({});
  EXPECT_FALSE(leavers_.AnyMidway());
  full_params_.EndEpoch();
  full_params_.Ask(0, {.writeback = true}, 0);
  EXPECT_TRUE(leavers_.AnyMidway()) << "it waits for all ranks";
}

}  // namespace
}  // namespace shardd
