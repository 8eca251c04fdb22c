#include "client/fsdp/group_lives.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/client/fsdp/fake_shell.h"

namespace shardd::fsdp {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Groups 0 and 1 share a slot, 2 has its own; three parameters each.
class GroupLivesTest : public ::testing::Test {
 protected:
  void Unshard(int group, shardd_phase phase) { EXPECT_TRUE(lives_.Unshard(group, phase).ok()); }
  void Write(int group, int param, bool fresh = false) {
    EXPECT_TRUE(lives_.PrepareGradients(group).ok());
    lives_.MarkGradient(group, param, fresh);
  }
  void Submit(int group) { EXPECT_TRUE(lives_.Submit(group).ok()); }
  void SubmitOwed(int group) { EXPECT_TRUE(lives_.SubmitOwed(group).ok()); }
  void EndBackward(int group, bool stays = false) {
    lives_.EndForward(group);
    lives_.EndBackward(group, stays);
  }

  FakeShell shell_;
  GroupLives lives_{shell_, {3, 3, 3}, {0, 0, 2}};
};

TEST_F(GroupLivesTest, EachUnshardIsPairedWithOneReshard) {
  Unshard(0, SHARDD_FORWARD);
  Unshard(0, SHARDD_BACKWARD);
  EXPECT_EQ(lives_.holds(0), 2);
  EXPECT_TRUE(lives_.Reshard(0).ok());
  EXPECT_TRUE(lives_.ReshardAll(0).ok());
  EXPECT_TRUE(lives_.ReshardAll(0).ok());
  EXPECT_EQ(lives_.holds(0), 0);
  EXPECT_THAT(shell_.Take(), ElementsAre("unshard 0 forward", "unshard 0 backward", "reshard 0", "reshard 0"));
}

TEST_F(GroupLivesTest, AnUnshardThatFailsHoldsNothing) {
  shell_.FailAt("unshard");
  EXPECT_TRUE(lives_.Unshard(0, SHARDD_FORWARD).aborted());
  EXPECT_TRUE(lives_.Prefetch(0).aborted());
  EXPECT_EQ(lives_.holds(0), 0);
  EXPECT_FALSE(lives_.prefetched(0));
}

TEST_F(GroupLivesTest, AReshardThatFailsIsOwedStill) {
  Unshard(0, SHARDD_FORWARD);
  shell_.FailAt("reshard");
  EXPECT_TRUE(lives_.ReshardAll(0).aborted());
  EXPECT_EQ(lives_.holds(0), 1);
}

TEST_F(GroupLivesTest, BackwardTakesWhatWasPrefetchedAndForwardDoesNot) {
  EXPECT_TRUE(lives_.Prefetch(0).ok());
  Unshard(0, SHARDD_FORWARD);
  EXPECT_TRUE(lives_.prefetched(0));
  Unshard(0, SHARDD_BACKWARD);
  EXPECT_FALSE(lives_.prefetched(0));
  EXPECT_EQ(lives_.holds(0), 2);
  EXPECT_THAT(shell_.Take(), ElementsAre("unshard 0 backward", "unshard 0 forward"));
}

TEST_F(GroupLivesTest, ReshardAllDropsWhatWasPrefetched) {
  EXPECT_TRUE(lives_.Prefetch(0).ok());
  EXPECT_TRUE(lives_.ReshardAll(0).ok());
  shell_.Take();
  Unshard(0, SHARDD_BACKWARD);
  EXPECT_THAT(shell_.Take(), ElementsAre("unshard 0 backward"));
}

TEST_F(GroupLivesTest, WhatIsWrittenIsSubmittedOnceWithItsMasks) {
  Write(0, 0);
  Write(0, 2, /*fresh=*/true);
  EXPECT_TRUE(lives_.HasGradient(0, 2));
  Submit(0);
  Submit(0);
  EXPECT_FALSE(lives_.HasGradient(0, 2));
  EXPECT_THAT(shell_.Take(), ElementsAre("slot 0", "submit 0 present=5 fresh=4"));
}

TEST_F(GroupLivesTest, AnotherGroupOfTheSlotSubmitsFirst) {
  Write(0, 0);
  Write(2, 0);
  Write(1, 1);
  Write(0, 2);
  EXPECT_THAT(shell_.Take(), ElementsAre("slot 0", "slot 2", "submit 0 present=1 fresh=0", "slot 1",
                                         "submit 1 present=2 fresh=0", "slot 0"));
  Submit(0);
  EXPECT_THAT(shell_.Take(), ElementsAre("submit 0 present=4 fresh=0"));
}

TEST_F(GroupLivesTest, ASlotThatWentToAnotherGroupIsAwaitedAgain) {
  EXPECT_TRUE(lives_.PrepareGradients(0).ok());  // and an exception before anything was written
  Write(1, 0);
  Write(0, 0);
  EXPECT_THAT(shell_.Take(), ElementsAre("slot 0", "slot 1", "submit 1 present=1 fresh=0", "slot 0"));
}

TEST_F(GroupLivesTest, ASubmissionThatFailsKeepsWhatIsWritten) {
  Write(0, 1);
  shell_.FailAt("submit");
  EXPECT_TRUE(lives_.Submit(0).aborted());
  EXPECT_TRUE(lives_.written(0));
  EXPECT_TRUE(lives_.PrepareGradients(1).aborted());
}

TEST_F(GroupLivesTest, AForwardWithoutGradientsOwesAnEmptyMask) {
  lives_.RanForward(0);
  SubmitOwed(0);
  SubmitOwed(0);
  EXPECT_THAT(shell_.Take(), ElementsAre("slot 0", "submit 0 present=0 fresh=0"));
  EndBackward(0);
  SubmitOwed(0);
  EXPECT_THAT(shell_.Take(), IsEmpty());
}

TEST_F(GroupLivesTest, AForwardWhoseGradientsWereSubmittedOwesNothing) {
  lives_.RanForward(0);
  Write(0, 0);
  Submit(0);
  shell_.Take();
  SubmitOwed(0);
  EXPECT_THAT(shell_.Take(), IsEmpty());
}

TEST_F(GroupLivesTest, APartialBackwardLeavesTheForwardsDebt) {
  lives_.RanForward(0);
  Write(0, 0);
  Submit(0);
  lives_.EndBackward(0, /*stays=*/false);
  shell_.Take();
  SubmitOwed(0);
  EXPECT_THAT(shell_.Take(), ElementsAre("slot 0", "submit 0 present=0 fresh=0"));
}

TEST_F(GroupLivesTest, GradientsWithoutAForwardTakePartInTheBackward) {
  Write(0, 0);
  SubmitOwed(0);
  EXPECT_THAT(shell_.Take(),
              ElementsAre("slot 0", "unshard 0 backward", "wait 0", "submit 0 present=1 fresh=0", "reshard 0"));
  EXPECT_EQ(lives_.holds(0), 0);
}

TEST_F(GroupLivesTest, GroupsLeftUnshardedAreReportedInTheNextBackward) {
  Unshard(0, SHARDD_FORWARD);
  EndBackward(0, /*stays=*/true);
  lives_.RanForward(0);
  shell_.Take();
  Write(0, 0);
  Submit(0);
  EXPECT_THAT(shell_.Take(),
              ElementsAre("slot 0", "unshard 0 backward", "wait 0", "submit 0 present=1 fresh=0", "reshard 0"));
  Write(0, 1);
  Submit(0);
  EXPECT_THAT(shell_.Take(), ElementsAre("slot 0", "submit 0 present=2 fresh=0"));
  EXPECT_EQ(lives_.holds(0), 1);
}

TEST_F(GroupLivesTest, AnAbandonedBackwardKeepsHoldsAndDropsWhatIsWritten) {
  Unshard(0, SHARDD_FORWARD);
  Write(0, 0);
  lives_.AbandonBackward(0);
  shell_.Take();
  Submit(0);
  Write(1, 0);
  EXPECT_EQ(lives_.holds(0), 1);
  EXPECT_THAT(shell_.Take(), ElementsAre("slot 1"));
}

TEST_F(GroupLivesTest, NothingOutlivesAnAttachment) {
  EXPECT_TRUE(lives_.Prefetch(0).ok());
  lives_.RanForward(0);
  Write(0, 0);
  EndBackward(0, /*stays=*/true);
  lives_.RanForward(0);
  lives_.Forget(0);
  shell_.Take();
  EXPECT_TRUE(lives_.ReshardAll(0).ok());
  SubmitOwed(0);
  EXPECT_THAT(shell_.Take(), IsEmpty());
  Unshard(0, SHARDD_BACKWARD);
  EXPECT_THAT(shell_.Take(), ElementsAre("unshard 0 backward"));
}

}  // namespace
}  // namespace shardd::fsdp
