#include "server/multinode/reached_nodes.h"

#include <gtest/gtest.h>

#include "tests/server/multinode/node_world.h"

namespace shardd {
namespace {

class ReachedNodesTest : public ::testing::Test {
 protected:
  ReachedNodesTest() { reached_.Start(start_); }
  const std::shared_ptr<const ShardPlan> plan_ = testing::NodesPlan(/*nodes=*/3, /*allow_missing=*/false);
  const absl::Time start_ = absl::FromUnixSeconds(1000);
  ReachedNodes reached_{plan_.get(), /*node=*/1};
};

TEST_F(ReachedNodesTest, ANodeReachesItselfAndThoseWithALink) {
  EXPECT_EQ(reached_.Unreached(), "node 0 (host0:7000) is not reached");
  reached_.OnUp(0);
  reached_.SetWhy(2, "another job has this name");
  EXPECT_EQ(reached_.Unreached(), "node 2 (host2:7000) is not reached: another job has this name");
  EXPECT_FALSE(reached_.all());
  reached_.OnUp(2);
  EXPECT_TRUE(reached_.all());
  EXPECT_EQ(reached_.Unreached(), "");
}

// Two nodes that are away one after the other are no node that has been away for as long as both.
TEST_F(ReachedNodesTest, EachNodeHasAClockOfItsOwn) {
  constexpr absl::Duration kGrace = absl::Minutes(15);
  reached_.OnUp(0);
  reached_.OnUp(2);
  EXPECT_TRUE(reached_.OnDown(0, "reset by peer", start_));
  EXPECT_TRUE(reached_.OnDown(2, "reset by peer", start_ + absl::Minutes(14)));
  reached_.OnUp(0);
  EXPECT_EQ(reached_.UnreachedFor(start_ + absl::Minutes(20), start_, kGrace), "");
  EXPECT_FALSE(reached_.OnDown(2, "no route", start_ + absl::Minutes(28)));
  EXPECT_EQ(reached_.UnreachedFor(start_ + absl::Minutes(29), start_, kGrace),
            "node 2 (host2:7000) is not reached: no route, for 15m");
}

TEST_F(ReachedNodesTest, ANodeThatHasNeverComeCountsFromTheStart) {
  reached_.OnUp(2);
  EXPECT_EQ(reached_.UnreachedFor(start_ + absl::Minutes(14), start_, absl::Minutes(15)), "");
  EXPECT_NE(reached_.UnreachedFor(start_ + absl::Minutes(15), start_, absl::Minutes(15)), "");
}

// A node whose machine comes late is missed by nobody who needs it only then.
TEST_F(ReachedNodesTest, NobodyIsMissedBeforeOthersAreNeeded) {
  const absl::Time needed_since = start_ + absl::Minutes(16);
  EXPECT_EQ(reached_.UnreachedFor(start_ + absl::Minutes(30), needed_since, absl::Minutes(15)), "");
  EXPECT_NE(reached_.UnreachedFor(start_ + absl::Minutes(31), needed_since, absl::Minutes(15)), "");
  EXPECT_EQ(reached_.UnreachedFor(start_ + absl::Hours(9), absl::InfiniteFuture(), absl::Minutes(15)), "");
}

}  // namespace
}  // namespace shardd
