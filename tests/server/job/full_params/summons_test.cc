#include "server/job/full_params/summons.h"

#include <gtest/gtest.h>

#include "tests/server/job/summons_fixture.h"

namespace shardd {
namespace {

class SummonsTest : public SummonsFactsTest {
 protected:
  SummonsTest() {
    Attach(0);
    Attach(1);
  }
  absl::Status Enter(int rank, uint32_t flags = 0) {
    RankCommand command;
    command.opcode = Opcode::kEnterFullParams;
    command.flags = flags;
    command.group = -1;
    return summons_.Enter(sessions_[rank].get(), command);
  }
  absl::Status Leave(int rank) { return summons_.Leave(sessions_[rank].get(), /*done=*/0, &last_left_); }
  bool inside(int rank) const { return summons_.full_params().inside(rank); }

  bool last_left_ = false;
};

TEST_F(SummonsTest, AllRanksEnterTogetherAndTheLastOneLeaves) {
  ASSERT_TRUE(Enter(0).ok());
  EXPECT_EQ(summons_.WaitingFor(0).rank, 1);
  ExpectRefused(Enter(0), "EnterFullParams: the rank is inside already");
  ExpectRefused(Leave(0), "LeaveFullParams: the rank is not inside");
  ASSERT_TRUE(Enter(1).ok());
  EXPECT_TRUE(summons_.MayGrant() && summons_.CheckEqualBackwards().ok());
  ASSERT_TRUE(summons_.LetIn().ok());
  EXPECT_TRUE(inside(0) && inside(1));
  EXPECT_FALSE(summons_.MayGrant()) << "they are in";
  ASSERT_TRUE(Leave(0).ok());
  EXPECT_FALSE(last_left_);
  ASSERT_TRUE(Leave(1).ok());
  EXPECT_TRUE(last_left_);
}

TEST_F(SummonsTest, WhoeverOnlyReadsNeedsNobodyWhoHasFinished) {
  leavers_.Left(1, /*finished=*/true);
  ExpectRefused(Enter(0, kWriteback), "rank 1 has finished and takes part in nothing any more");
  ExpectRefused(Enter(0, kWithGrads), "rank 1 has finished and takes part in nothing any more");
  EXPECT_FALSE(summons_.MayGrant()) << "nobody has asked";
  ASSERT_TRUE(Enter(0).ok());
  EXPECT_TRUE(summons_.IsReady(1) && summons_.MayGrant());
  ASSERT_TRUE(summons_.LetIn().ok());
  EXPECT_TRUE(inside(0) && !inside(1));
  ASSERT_TRUE(Leave(0).ok());
  EXPECT_TRUE(last_left_);
}

TEST_F(SummonsTest, RanksThatAskForDifferentThingsAreRefused) {
  ASSERT_TRUE(Enter(0).ok());
  EXPECT_EQ(Enter(1, kWriteback).code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(SummonsTest, NobodyEntersInAPass) {
  ASSERT_TRUE(FactsTest::Enter(0).ok());
  ExpectRefused(Enter(0), "the rank is inside a pass, or hands in");
}

TEST_F(SummonsTest, AWritebackWithoutRoomIsRefusedOnAllRanks) {
  undo_fits_ = absl::ResourceExhaustedError("no room");
  ASSERT_TRUE(Enter(0, kWriteback).ok() && Enter(1, kWriteback).ok());
  ASSERT_TRUE(summons_.LetIn().ok());
  EXPECT_FALSE(inside(0) || inside(1));
  EXPECT_FALSE(summons_.full_params().AnyAsked()) << "they are where they were";
  EXPECT_TRUE(Enter(0).ok());
}

TEST_F(SummonsTest, GradientsAreAskedForBetweenEqualBackwards) {
  CloseBackward(0);
  ASSERT_TRUE(Enter(0, kWithGrads).ok() && Enter(1, kWithGrads).ok());
  ExpectRefused(summons_.CheckEqualBackwards(), "ranks have closed different numbers of backwards");
  EXPECT_TRUE(summons_.SumsHold(/*sums_may_wait=*/true));
}

}  // namespace
}  // namespace shardd
