#include "server/multinode/node_fetch.h"

#include <gtest/gtest.h>

#include "tests/common/plan/spec_builder.h"

namespace shardd {
namespace {

class NodeFetchTest : public ::testing::Test {
 protected:
  NodeFetchTest() {
    SpecBuilder builder(1);
    builder.Param(0, "w", {8});
    plan_ = builder.Plan();
    state_.set_transfer(7);
    state_.set_step(3);
    state_.set_version(4);
    state_.add_step_counts(3);
  }
  v1::PeerMessage::RankState RankState(uint64_t transfer, int rank, const std::string& text) {
    v1::PeerMessage::RankState state;
    state.set_transfer(transfer);
    state.set_rank(rank);
    state.set_trainer_state(text);
    return state;
  }
  ShardPlan plan_;
  v1::PeerMessage::State state_;
  NodeFetch fetch_{/*from=*/1, /*transfer=*/7, /*ranks=*/2};
};

TEST_F(NodeFetchTest, IsCompleteOnceWithBytesAndState) {
  fetch_.SlabsAreThere();
  EXPECT_FALSE(fetch_.complete());
  EXPECT_TRUE(fetch_.TakeState(plan_, state_).ok());
  EXPECT_TRUE(fetch_.complete());
  EXPECT_EQ(fetch_.Take().step(), 3);
  EXPECT_FALSE(fetch_.complete());
}

TEST_F(NodeFetchTest, AStateThatDoesNotFitThePlanIsRefused) {
  state_.add_step_counts(1);
  EXPECT_EQ(fetch_.TakeState(plan_, state_).code(), absl::StatusCode::kFailedPrecondition);
  fetch_.SlabsAreThere();
  EXPECT_FALSE(fetch_.complete());
}

TEST_F(NodeFetchTest, WhatBelongsToAnotherTransferIsIgnored) {
  state_.set_transfer(6);
  EXPECT_TRUE(fetch_.TakeState(plan_, state_).ok());
  fetch_.SlabsAreThere();
  EXPECT_FALSE(fetch_.complete());
  fetch_.TakeRankState(RankState(7, 0, "new"));
  fetch_.TakeRankState(RankState(6, 0, "old"));
  fetch_.TakeRankState(RankState(7, 2, "no such rank"));
  EXPECT_EQ(fetch_.TakeTrainerStates(), (std::vector<std::string>{"new", ""}));
}

}  // namespace
}  // namespace shardd
