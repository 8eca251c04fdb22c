#include "server/job/writes/trainer_writes.h"

#include <gtest/gtest.h>

#include "tests/server/job/facts_fixture.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

Wait Nobody(int) { return {}; }

class TrainerWritesTest : public FactsTest {};

TEST_F(TrainerWritesTest, APassIsEnteredFromOutsideAlone) {
  EXPECT_TRUE(Enter(0).ok());
  EXPECT_EQ(writes_.WaitingToEnter(0).rank, 1);
  ExpectRefused(Enter(0), "EnterPass: the rank is entering already");
  ASSERT_TRUE(Enter(1).ok());
  EXPECT_EQ(writes_.WaitingToEnter(0).rank, -1);
  writes_.LetInAll();
  ExpectRefused(Enter(0), "the rank is inside one; LeavePass first");
  EXPECT_TRUE(writes_.LeavePass(0).ok());
  ExpectRefused(writes_.LeavePass(0), "LeavePass: the rank is not inside a pass");
}

TEST_F(TrainerWritesTest, NobodyEntersWithoutARankThatHasFinished) {
  leavers_.Left(1, /*finished=*/true);
  ExpectRefused(Enter(0), "rank 1 has finished");
  EXPECT_TRUE(writes_.passes().outside(0));
  ExpectRefused(writes_.AskToHandIn(0), "HandIn: rank 1 has finished");
}

TEST_F(TrainerWritesTest, ATrainerStateIsKeptUntilThePassBegins) {
  std::string state = "epoch 3";
  ASSERT_TRUE(writes_.EnterPass(0, /*stepped=*/false, 0, &state).ok());
  std::string with_step = "epoch 4";
  ASSERT_TRUE(writes_.EnterPass(1, /*stepped=*/true, 0, &with_step).ok());
  EXPECT_EQ(with_step, "epoch 4") << "it is the step's";
  EXPECT_EQ(writes_.TakeTrainerState(0), "epoch 3");
  EXPECT_EQ(writes_.TakeTrainerState(0), "");
}

TEST_F(TrainerWritesTest, RanksThatDifferInTheirStepAreRefused) {
  ASSERT_TRUE(Enter(0, /*stepped=*/true).ok() && Enter(1, /*stepped=*/false).ok());
  ExpectRefused(writes_.StepComesFirst().status(), "ranks differ in whether they made an optimizer step");
  EXPECT_TRUE(writes_.NoStepComesFirst()) << "the error is said where the pass begins";
}

TEST_F(TrainerWritesTest, AStepOfAllRanksComesBeforeTheirPass) {
  steps_.Ask(0, {}, 0);
  ExpectRefused(writes_.StepComesFirst().status(), "without the Step that rank 0 has sent");
  steps_.Ask(1, {}, 0);
  EXPECT_TRUE(*writes_.StepComesFirst());
  EXPECT_FALSE(writes_.NoStepComesFirst());
}

TEST_F(TrainerWritesTest, ARankOutsideOfPassesHandsInBeforeItsStep) {
  EXPECT_FALSE(writes_.MayHandIn()) << "nobody asks";
  ASSERT_TRUE(writes_.AskToHandIn(0).ok());
  ExpectRefused(writes_.AskToHandIn(0), "the rank has asked for it already");
  EXPECT_TRUE(writes_.MayHandIn());
  writes_.LetHandIn();
  EXPECT_TRUE(writes_.hand_ins().open(0));
  writes_.Step(0);
  EXPECT_FALSE(writes_.hand_ins().open(0));
  writes_.StepCommitted();
  EXPECT_FALSE(writes_.hand_ins().any_since_version());
  EXPECT_EQ(counters_.hand_ins(), 1);
}

TEST_F(TrainerWritesTest, NobodyHandsInWhileFullParametersAreAskedFor) {
  ASSERT_TRUE(writes_.AskToHandIn(0).ok());
  full_params_.Ask(1, {}, 0);
  EXPECT_FALSE(writes_.MayHandIn());
}

TEST_F(TrainerWritesTest, WhoWantsToHandInWaitsForReaders) {
  BeginPass();
  ASSERT_TRUE(writes_.LeavePass(0).ok());
  ExpectRefused(writes_.AskToHandIn(1), "the rank is inside a pass");
  ASSERT_TRUE(writes_.AskToHandIn(0).ok());
  EXPECT_EQ(writes_.WaitingToHandIn(0).rank, 1);
  EXPECT_EQ(writes_.WaitingToHandIn(0).call, "LeavePass");
  EXPECT_EQ(writes_.WaitingToStore(0).rank, -1);
  EXPECT_FALSE(writes_.MayHandIn());
  ASSERT_TRUE(writes_.LeavePass(1).ok());
  EXPECT_TRUE(writes_.MayHandIn());
}

TEST_F(TrainerWritesTest, ARankThatMissedABackwardIsReadmitted) {
  BeginPass();
  ASSERT_TRUE(writes_.LeavePass(0).ok());
  ASSERT_TRUE(Enter(0).ok());
  EXPECT_THAT(writes_.LateRanks(Nobody), IsEmpty());
  CloseBackward(1);  // which is inside
  EXPECT_THAT(writes_.LateRanks(Nobody), ElementsAre(0));
  writes_.ReadmitLate(Nobody);
  EXPECT_TRUE(writes_.passes().inside(0));
}

TEST_F(TrainerWritesTest, ARankThatAnotherSleepsForIsReadmitted) {
  BeginPass();
  ASSERT_TRUE(writes_.LeavePass(0).ok());
  ASSERT_TRUE(Enter(0).ok());
  pairing_.Sleep(1, /*slot=*/0);
  EXPECT_THAT(writes_.LateRanks([](int) { return Wait{0, "SubmitGradients"}; }), ElementsAre(0));
}

TEST_F(TrainerWritesTest, TheEndOfAnEpochForgetsAll) {
  BeginPass();
  writes_.EndEpoch();
  EXPECT_TRUE(writes_.passes().outside(0) && writes_.passes().outside(1));
}

}  // namespace
}  // namespace shardd
