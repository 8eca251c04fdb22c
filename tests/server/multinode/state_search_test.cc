// Nodes 1, 3 and 5 have one place in three rows; 3 has lost what they hold.

#include "server/multinode/state_search.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/multinode/reached_nodes.h"
#include "tests/server/multinode/node_world.h"

namespace shardd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Next = StateSearch::Next;

constexpr absl::Duration kSilenceLimit = absl::Minutes(2);

class StateSearchTest : public ::testing::Test {
 protected:
  explicit StateSearchTest(int nodes = 6, int node = 3)
      : plan_(testing::NodesPlan(nodes, /*allow_missing=*/false, /*cut=*/true, /*row=*/2)), node_(node) {
    reached_.Start(now_);
    for (int other = 0; other < nodes; ++other) Up(other);
  }
  void Up(int node) {
    reached_.OnUp(node);
    search_.OnUp(node);
  }
  bool Down(int node) {
    reached_.OnDown(node, "reset by peer", now_);
    return search_.OnDown(node);
  }
  static v1::PeerMessage::Begin BeginOf(int64_t step, bool initialized = true) {
    v1::PeerMessage::Begin begin;
    begin.set_generation(9);
    begin.set_initialized(initialized);
    begin.set_decided_step(step);
    begin.set_version(initialized ? static_cast<uint64_t>(step) + 1 : 0);
    return begin;
  }
  // Node 0 has step 3, which is lost here.
  void Lose() {
    search_.Begin(/*sender=*/0, BeginOf(3));
    ASSERT_EQ(search_.Ask(now_), Next::kAsk);
  }
  // What the node that was asked answers, and whether that is too little.
  bool Lacks(int64_t step, uint64_t version, uint64_t generation = 0) {
    v1::PeerMessage::State state;
    state.set_transfer(search_.transfer());
    state.set_step(step);
    state.set_version(version);
    state.set_version_generation(generation);
    return search_.Lacks(state);
  }
  Next CheckAfter(absl::Duration time) { return search_.CheckSilence(now_ += time, kSilenceLimit); }

  const std::shared_ptr<const ShardPlan> plan_;
  const int node_;
  absl::Time now_ = absl::FromUnixSeconds(1000);
  ReachedNodes reached_{plan_.get(), node_};
  StateSearch search_{plan_.get(), node_, &reached_};
};

TEST_F(StateSearchTest, NodesOfThePlaceAreAskedOneAfterTheOther) {
  Lose();
  EXPECT_EQ(search_.from(), 1);
  EXPECT_TRUE(Lacks(0, 0));
  EXPECT_EQ(search_.Ask(now_), Next::kAsk);
  EXPECT_EQ(search_.from(), 5);
  EXPECT_FALSE(Lacks(3, 4));
}

TEST_F(StateSearchTest, AnOlderStateCountsAsNone) {
  Lose();
  EXPECT_TRUE(Lacks(2, 3));
  EXPECT_TRUE(Lacks(3, 3)) << "another has values that were written behind the step";
  EXPECT_FALSE(Lacks(4, 5));
}

TEST_F(StateSearchTest, WhatBelongsToAnotherTransferIsStale) {
  Lose();
  v1::PeerMessage::State state;
  state.set_transfer(search_.transfer());
  EXPECT_FALSE(search_.IsStale(state));
  ASSERT_EQ(search_.Ask(now_), Next::kAsk);
  EXPECT_TRUE(search_.IsStale(state)) << "every transfer has a number of its own";
}

// Who says so may be sent it by the third one behind that.
TEST_F(StateSearchTest, OfThreeRowsAllAreAskedTwiceBeforeNoneHasIt) {
  Lose();
  for (int said = 1; said < 4; ++said) {
    EXPECT_TRUE(Lacks(0, 0));
    ASSERT_EQ(search_.Ask(now_), Next::kAsk) << said;
  }
  EXPECT_TRUE(Lacks(0, 0));
  EXPECT_EQ(search_.Ask(now_), Next::kNoneHas);
  EXPECT_THAT(search_.WhereItWas(Next::kNoneHas),
              AllOf(HasSubstr("node 1 (host1:7000), node 5 (host5:7000)"), HasSubstr("whose daemons have lost it")));
}

TEST_F(StateSearchTest, WhoseLinkIsLostIsReplacedByTheNext) {
  Lose();
  EXPECT_FALSE(Down(5)) << "it was not asked";
  Up(5);
  EXPECT_TRUE(Down(1));
  EXPECT_EQ(search_.Ask(now_), Next::kAsk);
  EXPECT_EQ(search_.from(), 5);
  EXPECT_TRUE(Down(5));
  EXPECT_EQ(search_.Ask(now_), Next::kWait);
  EXPECT_EQ(search_.from(), -1);
  EXPECT_THAT(search_.Text(), HasSubstr("once one of them has a link"));
}

TEST_F(StateSearchTest, ASilentNodeIsPassedOver) {
  Lose();
  EXPECT_EQ(CheckAfter(kSilenceLimit / 2), Next::kWait);
  EXPECT_EQ(CheckAfter(kSilenceLimit), Next::kAsk);
  EXPECT_EQ(search_.from(), 5);
}

TEST_F(StateSearchTest, WhoIsSilentIsAskedAgainWhereOthersHaveNone) {
  Lose();
  ASSERT_EQ(CheckAfter(kSilenceLimit), Next::kAsk);
  for (int said = 0; said < 2; ++said) {
    EXPECT_TRUE(Lacks(0, 0));
    ASSERT_EQ(search_.Ask(now_), Next::kAsk);
  }
  EXPECT_EQ(search_.from(), 1);
}

// A large state takes longer than anybody may be silent.
TEST_F(StateSearchTest, EveryPieceRestartsTheSendersClocks) {
  Lose();
  for (absl::Duration time; time < 3 * absl::Milliseconds(plan_->config.grace_ms()); time += kSilenceLimit / 2) {
    ASSERT_EQ(CheckAfter(kSilenceLimit / 2), Next::kWait);
    search_.Comes(now_);
  }
  EXPECT_EQ(CheckAfter(kSilenceLimit), Next::kAsk);
}

// The last pieces of one whose link has ended are no sign of the next one.
TEST_F(StateSearchTest, PiecesOfNobodyWhoIsAskedStartNoClock) {
  Lose();
  EXPECT_TRUE(Down(1));
  Down(5);
  ASSERT_EQ(search_.Ask(now_), Next::kWait);
  search_.Comes(now_);
  now_ += absl::Milliseconds(plan_->config.grace_ms()) - absl::Seconds(1);
  Up(1);
  ASSERT_EQ(search_.Ask(now_), Next::kAsk);
  EXPECT_EQ(CheckAfter(absl::Minutes(1)), Next::kWait);
}

TEST_F(StateSearchTest, ItIsGivenUpWhereNothingComesForGrace) {
  Lose();
  Next next = Next::kWait;
  while (next != Next::kSilent && now_ < absl::FromUnixSeconds(1000) + absl::Hours(100))
    next = CheckAfter(kSilenceLimit);
  EXPECT_EQ(now_ - absl::FromUnixSeconds(1000), absl::Milliseconds(plan_->config.grace_ms()));
  EXPECT_THAT(search_.WhereItWas(next), AllOf(HasSubstr("node 1 (host1:7000), node 5 (host5:7000), and nothing of it"),
                                              HasSubstr("may hang, or be of an earlier build")));
}

TEST_F(StateSearchTest, WhatHasComeNeedsNobodyAnyMore) {
  Lose();
  EXPECT_FALSE(search_.has_come());
  search_.Came(3, 4);
  EXPECT_TRUE(search_.has_come());
  EXPECT_FALSE(Down(1));
  EXPECT_EQ(CheckAfter(absl::Hours(100)), Next::kWait);
  EXPECT_EQ(search_.Hear(BeginOf(3), now_), Next::kWait);
  EXPECT_EQ(search_.came().version, 4u);
  search_.End();
  EXPECT_FALSE(search_.has_come());
}

TEST_F(StateSearchTest, WhatHasComeIsDroppedWhereNode0KnowsANewerOne) {
  Lose();
  search_.Came(3, 4);
  EXPECT_EQ(search_.Hear(BeginOf(4), now_), Next::kAsk);
  EXPECT_FALSE(search_.has_come());
  EXPECT_TRUE(Lacks(3, 4));
}

// Who decided step 3 is lost with all that had promised it.
TEST_F(StateSearchTest, AnOlderStateIsEnoughForANewNode0WhoseNodesHaveNoOther) {
  Lose();
  for (int said = 0; said < 3; ++said) {
    EXPECT_TRUE(Lacks(2, 3));
    ASSERT_EQ(search_.Ask(now_), Next::kAsk);
  }
  EXPECT_EQ(search_.Hear(BeginOf(2), now_), Next::kWait);
  EXPECT_FALSE(Lacks(2, 3));
  EXPECT_TRUE(Lacks(1, 2));
  EXPECT_EQ(search_.Ask(now_), Next::kAsk) << "what was said before counts no more";
}

// A machine that was cut off has made the version, and the others have made it anew without it.
TEST_F(StateSearchTest, AStateOfAnotherAttemptCountsAsNone) {
  Lose();
  v1::PeerMessage::Begin begin = BeginOf(3);
  begin.set_version_generation(8);
  EXPECT_EQ(search_.Hear(begin, now_), Next::kWait);
  EXPECT_TRUE(Lacks(3, 4, 7));
  EXPECT_TRUE(Lacks(4, 4, 7)) << "a step, where the others have made values";
  EXPECT_FALSE(Lacks(3, 4, 8));
  EXPECT_FALSE(Lacks(3, 4)) << "an older daemon does not say";
  v1::PeerMessage::State state;
  state.set_step(3);
  state.set_version(4);
  state.set_version_generation(8);
  search_.Takes(state, now_);
  search_.Came(3, 4);
  EXPECT_EQ(search_.came().generation, 8u);
  begin.set_version_generation(9);
  EXPECT_EQ(search_.Hear(begin, now_), Next::kAsk);
}

TEST_F(StateSearchTest, WhoIsPassedOverIsToldSoOnce) {
  Lose();
  EXPECT_EQ(search_.TakePassedOver(), -1);
  ASSERT_EQ(CheckAfter(kSilenceLimit), Next::kAsk);
  EXPECT_EQ(search_.TakePassedOver(), 1);
  EXPECT_EQ(search_.TakePassedOver(), -1);
  EXPECT_TRUE(Down(5));
  ASSERT_EQ(search_.Ask(now_), Next::kAsk);
  EXPECT_EQ(search_.TakePassedOver(), -1) << "its link has ended";
}

TEST_F(StateSearchTest, ABeginWithoutTheVersionLeavesTheKnownOne) {
  Lose();
  v1::PeerMessage::Begin begin = BeginOf(3);
  begin.clear_version();
  EXPECT_EQ(search_.Hear(begin, now_), Next::kWait);
  EXPECT_TRUE(Lacks(3, 3));
}

TEST_F(StateSearchTest, WhatComesIsAskedForAnewWhereNode0KnowsANewerOne) {
  Lose();
  v1::PeerMessage::State state;
  state.set_step(3);
  state.set_version(4);
  search_.Takes(state, now_);
  EXPECT_EQ(search_.Hear(BeginOf(3), now_), Next::kWait);
  const uint64_t transfer = search_.transfer();
  EXPECT_EQ(search_.Hear(BeginOf(4), now_), Next::kAsk);
  EXPECT_NE(search_.transfer(), transfer);
}

TEST_F(StateSearchTest, AStateIsAheadWhereNode0GoesOnFromAnOlderOne) {
  Lose();
  search_.Came(3, 4);
  EXPECT_FALSE(search_.is_ahead());
  EXPECT_EQ(search_.Hear(BeginOf(2), now_), Next::kWait);
  EXPECT_TRUE(search_.is_ahead());
}

TEST_F(StateSearchTest, Node0ThatKnowsOfNoneLeavesTheAskedAlone) {
  Lose();
  const uint64_t transfer = search_.transfer();
  EXPECT_EQ(search_.Hear(BeginOf(0, /*initialized=*/false), now_), Next::kWait);
  EXPECT_EQ(search_.transfer(), transfer);
  EXPECT_FALSE(search_.wanted());
}

TEST_F(StateSearchTest, WhatComesBehindItsSendersLinkKeepsItsAttempt) {
  Lose();
  EXPECT_FALSE(Lacks(3, 4, 70));
  EXPECT_TRUE(Down(1));
  Down(5);
  EXPECT_EQ(search_.Ask(now_), Next::kWait);
  search_.Came(3, 4, 70);
  EXPECT_EQ(search_.came().generation, 70u);
}

TEST_F(StateSearchTest, StepsAreComparedWhereAnAttemptIsNotKnown) {
  v1::PeerMessage::Begin begin = BeginOf(9);
  search_.Begin(/*sender=*/0, begin);
  ASSERT_EQ(search_.Ask(now_), Next::kAsk);
  EXPECT_TRUE(Lacks(8, 10)) << "the others made another version 10";
}

TEST_F(StateSearchTest, ASearchThatBeginsAnewForgetsTheOneBefore) {
  Lose();
  search_.Came(3, 4);
  Lose();
  EXPECT_FALSE(search_.has_come());
  EXPECT_EQ(search_.from(), 1);
  EXPECT_FALSE(Lacks(3, 4));
}

class StateSearchOfTwoRows : public StateSearchTest {
 protected:
  StateSearchOfTwoRows() : StateSearchTest(/*nodes=*/4, /*node=*/0) {}
};

TEST_F(StateSearchOfTwoRows, TheOtherIsAskedOnce) {
  Lose();
  EXPECT_EQ(search_.from(), 2);
  EXPECT_TRUE(Lacks(0, 0));
  EXPECT_EQ(search_.Ask(now_), Next::kNoneHas);
  EXPECT_THAT(search_.WhereItWas(Next::kNoneHas), HasSubstr("node 2 (host2:7000), whose daemon has lost it"));
}

TEST_F(StateSearchOfTwoRows, WhoSaidNothingMayHaveItOverTheNextLink) {
  Lose();
  EXPECT_TRUE(Lacks(0, 0));
  EXPECT_EQ(search_.Ask(now_), Next::kNoneHas);
  Up(2);
  EXPECT_EQ(search_.Ask(now_), Next::kAsk);
}

TEST_F(StateSearchOfTwoRows, ASilentOneIsAskedOnAndNotAnew) {
  Lose();
  const uint64_t transfer = search_.transfer();
  EXPECT_EQ(CheckAfter(kSilenceLimit), Next::kWait);
  EXPECT_EQ(CheckAfter(kSilenceLimit), Next::kWait);
  EXPECT_EQ(search_.transfer(), transfer);
  EXPECT_THAT(search_.Text(), AllOf(HasSubstr("from node 2"), Not(HasSubstr("once"))));
}

// Node 0 chooses who sends it, and waits for a link that goes.
TEST(StateSearchOfReplicas, HasOneSenderAndNoClock) {
  const auto plan = testing::NodesPlan(/*nodes=*/3, /*allow_missing=*/false);
  ReachedNodes reached(plan.get(), /*node=*/2);
  StateSearch search(plan.get(), /*node=*/2, &reached);
  v1::PeerMessage::Begin begin;
  begin.set_generation(5);
  search.Begin(/*sender=*/0, begin);
  EXPECT_TRUE(search.Awaits(0));
  EXPECT_FALSE(search.IsOfPlace(0) || search.OnDown(0) || search.has_come());
  EXPECT_EQ(search.CheckSilence(absl::InfiniteFuture(), kSilenceLimit), Next::kWait);
  EXPECT_FALSE(search.Lacks({}));
  search.CountFrom(7);
  search.CountFrom(6);
  EXPECT_EQ(search.generation(), 7u);
}

}  // namespace
}  // namespace shardd
