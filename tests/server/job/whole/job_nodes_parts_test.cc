// Several optimizers of one model over two nodes: all make the same parts of a step, and commit or take back all of
// them.

#include "tests/server/job/parts_over_nodes.h"

namespace shardd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class JobNodesParts : public PartsOverNodes {};

TEST_P(JobNodesParts, PartsAreSeenAtOnceAndCommittedTogether) {
  PauseBetweenParts();
  for (int node = 0; node < 2; ++node) EXPECT_EQ(job(node).committed().step(), 1);
  for (int node = 0; node < 2; ++node) Last(node);
  for (int node = 0; node < 2; ++node) {
    ASSERT_TRUE(Until([&] { return job(node).committed().step() == 2; })) << Why(node);
  }
  ExpectAll(-2, -2);
  StepAll(3);
}

TEST_P(JobNodesParts, ARankLostBetweenPartsTakesAllNodesBack) {
  PauseBetweenParts();
  Lose(1);
  ExpectAllBackAt(1);
}

TEST_P(JobNodesParts, ALinkLostBetweenPartsTakesAllNodesBack) {
  PauseBetweenParts();
  Last(0);
  wire_.SetUp(false);
  wire_.SetUp(true);
  ExpectAllBackAt(1);
}

// Node 0 makes the part, and node 1 never hears of it.
TEST_P(JobNodesParts, APartThatOneNodeMissesIsPutBackOnTheOther) {
  Begin();
  StepAll(1);
  for (int node = 0; node < 2; ++node) Backward(node);
  wire_.Drop([](int to, const v1::PeerMessage& message) { return message.has_decided() && to == 1; });
  for (int node = 0; node < 2; ++node) First(node);
  ASSERT_TRUE(PartsAre(0, 1));
  EXPECT_FALSE(job(1).nodes().promised()) << "of a part nothing is promised";
  wire_.Drop(nullptr);
  wire_.SetUp(false);
  wire_.SetUp(true);
  ExpectAllBackAt(1);
}

TEST_P(JobNodesParts, OtherPartsOnAnotherNodeAreAnErrorAtOnce) {
  Begin();
  StepAll(1);
  for (int node = 0; node < 2; ++node) Backward(node);
  First(0);
  StepOf(1, {0, 1}, /*part=*/true);
  for (int node = 0; node < 2; ++node) {
    ASSERT_TRUE(Gone(node));
    EXPECT_THAT(Why(node), AllOf(HasSubstr("node 1 (host1:7000"), HasSubstr("left_groups (got [0, 1], want [0, 2])")));
  }
  ExpectAllBackAt(1);
}

TEST_P(JobNodesParts, AWholeStepBesideAPartIsAnErrorAtOnce) {
  PauseBetweenParts();
  StepOf(0, {0, 1}, /*part=*/true);
  Last(1);
  for (int node = 0; node < 2; ++node) {
    ASSERT_TRUE(Gone(node));
    EXPECT_THAT(Why(node), AllOf(HasSubstr("node 1 (host1:7000"), HasSubstr("part (got false, want true)")));
  }
  ExpectAllBackAt(1);
}

// Its ranks go on with a forward, and the others wait for the rest of the step.
TEST_P(JobNodesParts, ANodeThatLeavesOutItsLastPartIsToldAtOnce) {
  PauseBetweenParts();
  Last(0);
  v1::Command command;
  command.mutable_unshard()->set_phase(v1::PHASE_FORWARD);
  Send(1, command);
  for (int node = 0; node < 2; ++node) {
    ASSERT_TRUE(Gone(node));
    EXPECT_THAT(Why(node), HasSubstr("send Step without `part` first"));
  }
  ExpectAllBackAt(1);
}

// It has promised the step behind its parts, which node 0 has decided: they are committed with it.
TEST_P(JobNodesParts, AStepDecidedBehindPartsOutlivesItsLink) {
  PauseBetweenParts();
  wire_.Drop([](int to, const v1::PeerMessage& message) { return message.has_decided() && to == 1; });
  for (int node = 0; node < 2; ++node) Last(node);
  ASSERT_TRUE(Decides());
  ASSERT_TRUE(Promises(1));
  wire_.SetUp(false);
  wire_.Drop(nullptr);
  wire_.SetUp(true);
  for (int node = 0; node < 2; ++node) {
    ASSERT_TRUE(Until([&] { return job(node).view().committed_step() == 2; })) << node << Why(node);
  }
  ASSERT_TRUE(Gone(0));  // node 1 goes on in its epoch, behind the step
  ExpectAll(-2, -2);
  AttachAll();
  StepAll(3);
}

// Nobody decides what node 1 has promised, as node 0 has gone back.
TEST_P(JobNodesParts, AStepPromisedInVainBehindPartsIsPutBack) {
  PauseBetweenParts();
  Last(1);
  wire_.Drop([](int to, const v1::PeerMessage& message) { return message.has_reduced() && to == 0; });
  Last(0);
  ASSERT_TRUE(Promises(1));
  Lose(0);
  wire_.SetUp(false);
  wire_.Drop(nullptr);
  wire_.SetUp(true);
  ExpectAllBackAt(1);
}

INSTANTIATE_TEST_SUITE_P(All, JobNodesParts, ::testing::Values(v1::STRATEGY_HYBRID_SHARD, v1::STRATEGY_FULL_SHARD),
                         PartsName);

}  // namespace
}  // namespace shardd
