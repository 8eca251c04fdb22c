#include "server/job/nodes/job_nodes.h"

#include "tests/server/job/facts_fixture.h"

namespace shardd {
namespace {

class OneNodeTest : public FactsTest {
 protected:
  JobNodes nodes_{/*parts=*/nullptr, {plan_, nullptr, &decision_, &steps_, &leavers_, nullptr}, {&committed_}, {}};
};

TEST_F(OneNodeTest, NothingOfAJobOnOneNodeWaitsForOthers) {
  nodes_.Start();
  EXPECT_EQ(nodes_.node(), 0);
  EXPECT_FALSE(nodes_.over_nodes() || nodes_.promised() || nodes_.fetching() || nodes_.MayBeSentState() ||
               nodes_.MaySayFinished());
  EXPECT_TRUE(nodes_.MayDecide());
  EXPECT_GT(nodes_.held_step(), committed_.step()) << "it may be shown at once";
  EXPECT_TRUE(nodes_.CheckMayBegin("attach").ok());
  EXPECT_EQ(nodes_.WaitText(), "");
}

TEST_F(OneNodeTest, ItHasFinishedWithItsRanks) {
  leavers_.Left(0, /*finished=*/true);
  EXPECT_FALSE(nodes_.finished());
  leavers_.Left(1, /*finished=*/true);
  EXPECT_TRUE(nodes_.finished());
  EXPECT_FALSE(nodes_.ServesOthers());
}

TEST_F(OneNodeTest, EndsAreHeardByNobody) {
  nodes_.AttemptEnded(absl::AbortedError("the epoch ends"));
  nodes_.EndEpoch();
  nodes_.StepCommitted();
  nodes_.VersionCommitted();
  nodes_.CheckSilence(MonotonicNow());
  nodes_.Close("the job ends", {.everywhere = true});
  nodes_.ForgetExchange();
}

}  // namespace
}  // namespace shardd
