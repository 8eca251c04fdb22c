#include "server/job/epoch_end.h"

#include "server/job/nodes/job_nodes.h"
#include "tests/server/job/commits_fixture.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;

class EpochEndTest : public CommitsFixture {
 protected:
  JobNodes nodes_{/*parts=*/nullptr,
                  {plan_, memory_.get(), &commits_.decision(), &commits_.steps(), &leavers_, &devices_, nullptr},
                  {&committed_},
                  {}};
  EpochEnd end_{&commits_, &nodes_};
};

TEST_F(EpochEndTest, BeginsAtOnceUnlessAVersionIsBeingMade) {
  EXPECT_TRUE(end_.MayBegin());
  commits_.Begin();
  EXPECT_FALSE(end_.MayBegin());
}

TEST_F(EpochEndTest, ThatWaitsHasTheFirstCauseAndAllLostRanks) {
  end_.Await({absl::AbortedError("first"), {1}});
  end_.Await({absl::InternalError("second"), {0}});
  EXPECT_EQ(end_.cause().message(), "first");
  const EpochEnd::Pending end = end_.Take();
  EXPECT_EQ(end.cause.message(), "first");
  EXPECT_THAT(end.lost_ranks, ElementsAre(1, 0));
  EXPECT_FALSE(end_.pending());
}

TEST_F(EpochEndTest, IsPendingOnceAnAwaitedStepServesAndSaysSo) {
  int steps = 0;
  end_.AwaitStep(absl::AbortedError("the daemon stops"), [&] {
    EXPECT_FALSE(end_.pending());
    return ++steps == 2;
  });
  end_.StepCommitted();
  EXPECT_FALSE(end_.pending()) << "of the first there is no snapshot";
  end_.StepCommitted();
  ASSERT_TRUE(end_.pending());
  EXPECT_TRUE(end_.Take().behind_commit);
  end_.StepCommitted();
  EXPECT_FALSE(end_.pending()) << "once";
  EXPECT_EQ(steps, 2);
}

TEST_F(EpochEndTest, OfAnotherCauseEndsTheWaitForAStep) {
  end_.AwaitStep(absl::AbortedError("the daemon stops"), [] {
    ADD_FAILURE();
    return true;
  });
  end_.Await({absl::AbortedError("a rank is lost"), {1}});
  EXPECT_FALSE(end_.Take().behind_commit);
  end_.EndEpoch();
  end_.StepCommitted();
  EXPECT_FALSE(end_.pending());
}

TEST_F(EpochEndTest, OfAllNodesKeepsTheCauseOfThisOne) {
  EXPECT_EQ(end_.TakeOr(absl::AbortedError("all nodes'")).cause.message(), "all nodes'");
  end_.Await({absl::AbortedError("own"), {1}});
  EXPECT_EQ(end_.TakeOr(absl::AbortedError("all nodes'")).cause.message(), "own");
  EXPECT_FALSE(end_.pending());
}

TEST_F(EpochEndTest, OfAllNodesLeavesWhatWaitsForACommit) {
  end_.Await({absl::AbortedError("own"), {1}});
  commits_.Begin();
  EXPECT_EQ(end_.TakeOr(absl::AbortedError("all nodes'")).cause.message(), "all nodes'");
  EXPECT_TRUE(end_.pending());
}

}  // namespace
}  // namespace shardd
