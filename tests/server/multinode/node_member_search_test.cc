// What node 3 of three rows of two says and does while it searches the state that it has lost.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "server/loop/core_loop.h"
#include "server/multinode/node_member.h"
#include "tests/server/multinode/member_listener.h"
#include "tests/server/multinode/node_world.h"

namespace shardd {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr absl::Duration kLimit = absl::Minutes(2);

class NodeMemberSearchTest : public ::testing::Test, protected testing::MemberListener {
 protected:
  ~NodeMemberSearchTest() override {
    loop_.RunAndWait([this] { member_.Stop(); });
    loop_.Stop();
  }
  // All nodes have links, and this one has nothing of what node 0 says there is.
  void Begin(bool initialized = true) {
    loop_.RunAndWait([&] {
      member_.Start({this, this, this, this});
      for (const int node : {0, 1, 2, 4, 5}) member_.OnUp(node);
      HearBegin(initialized);
    });
  }
  void HearBegin(bool initialized = true) {
    v1::PeerMessage message;
    message.mutable_begin()->set_generation(++generation_);
    message.mutable_begin()->set_initialized(initialized);
    message.mutable_begin()->set_decided_step(initialized ? 3 : 0);
    message.mutable_begin()->set_version(initialized ? 4 : 0);
    member_.OnMessage(0, message);
  }
  // What another member does that goes on with `left` at its own step, and hears that `step` was decided in an attempt.
  void HearDecidedBehind(const NodeLeft& left, int64_t own_step, int64_t step, uint64_t decided_in,
                         uint64_t version = 0) {
    v1::PeerMessage::Begin begin;
    begin.set_decided_step(step);
    begin.set_version(version);
    begin.mutable_decided()->set_step(step);
    begin.mutable_decided()->set_generation(decided_in);
    HearBehind(left, own_step, std::move(begin));
  }
  // ... or that values were agreed on.
  void HearAgreedBehind(const NodeLeft& left, uint64_t version, uint64_t agreed_in) {
    v1::PeerMessage::Begin begin;
    begin.set_version(version);
    begin.set_version_generation(agreed_in);
    HearBehind(left, /*own_step=*/0, std::move(begin));
  }
  void HearBehind(
      const NodeLeft& left, int64_t own_step, v1::PeerMessage::Begin heard,
      const std::function<void(NodeMember&)>& then = [](NodeMember&) {}) {
    loop_.RunAndWait([&] {
      initialized_ = true;
      step_ = own_step;
      decided_.clear();
      asked_.clear();
      agreed_ = 0;
      NodeMember member(behind_plan_, /*node=*/3, &loop_, &links_, events_, this);
      aborted_ = &member;
      member.TakeUp(left);
      member.Start({this, this, this, this});
      for (const int node : {0, 1, 2, 4, 5}) member.OnUp(node);
      v1::PeerMessage message;
      heard.set_generation(9);
      heard.set_initialized(true);
      *message.mutable_begin() = heard;
      member.OnMessage(0, message);
      then(member);
      member.Stop();
      aborted_ = &member_;
    });
  }
  void HearState(int node, int64_t step, uint64_t version) {
    v1::PeerMessage message;
    message.mutable_state()->set_transfer(member_.search()->transfer());
    message.mutable_state()->set_step(step);
    message.mutable_state()->set_version(version);
    member_.OnMessage(node, message);
  }
  void Down(int node) { member_.OnDown(node, absl::UnavailableError("reset by peer")); }
  v1::PeerMessage::Holds LastHolds() const {
    v1::PeerMessage::Holds last;
    for (const v1::PeerMessage& message : links_.sent) {
      if (message.has_holds()) last = message.holds();
    }
    return last;
  }

  int64_t NodeStep() const override { return step_; }
  bool NodeInitialized() const override { return initialized_; }
  uint64_t NodeVersion() const override { return version_; }
  uint64_t NodeVersionGeneration() const override { return version_generation_; }
  void NodeDecided(const v1::PeerMessage::Decided& decided) override { decided_.push_back(decided.step()); }
  void NodeValuesAgreed() override { ++agreed_; }
  void NodeStopSending(int node) override { stopped_.push_back(node); }
  void NodeBeginFetch(int from, uint64_t) override { asked_.push_back(from); }
  void NodeTakeState(const v1::PeerMessage::State& state) override { taken_.push_back(state.step()); }
  void NodeEndFetch() override { ++ended_; }
  void NodeAbort(const absl::Status& cause) override {
    ++aborts_;
    aborted_->AttemptEnded(cause);
  }
  void NodeClose(const std::string& why) override { closed_.push_back(why); }

  CoreLoop loop_;
  testing::KeptLinks links_{/*node=*/3, /*nodes=*/6};
  const std::shared_ptr<const ShardPlan> plan_ = testing::NodesPlan(/*nodes=*/6, false, /*cut=*/true, /*row=*/2);
  const std::shared_ptr<NodeEvents> events_ =
      std::make_shared<NodeEvents>(&loop_, [](const v1::PeerHello&, bool) { return absl::OkStatus(); });
  std::shared_ptr<const ShardPlan> behind_plan_ = plan_;  // of who goes on with what is left
  NodeMember member_{plan_,
                     /*node=*/3, &loop_, &links_, events_, this};
  uint64_t generation_ = 7;
  NodeMember* aborted_ = &member_;  // whose attempts end
  bool initialized_ = false;
  int64_t step_ = 0;
  uint64_t version_ = 0;
  uint64_t version_generation_ = 0;
  int agreed_ = 0;
  std::vector<int> stopped_;
  std::vector<int64_t> decided_;
  std::vector<int> asked_;
  std::vector<int64_t> taken_;
  int ended_ = 0;
  int aborts_ = 0;
  std::vector<std::string> closed_;
};

// Node 0 does not know what was decided in the one that counts, so this node says nothing of it either.
TEST_F(NodeMemberSearchTest, WhatADroppedAttemptDecidedIsNotSaidAnyMore) {
  NodeLeft left;
  left.decided.set_step(3);
  left.decided.set_generation(7);
  version_ = 4;
  version_generation_ = 7;
  v1::PeerMessage::Begin begin;
  begin.set_decided_step(3);
  begin.set_version(4);
  begin.set_version_generation(8);
  HearBehind(left, /*own_step=*/3, begin, [this](NodeMember& member) {
    ASSERT_TRUE(member.fetching());
    member.search()->Came(3, 4, 8);
    member.OnDown(0, absl::UnavailableError("reset by peer"));
    member.OnUp(0);
    EXPECT_EQ(LastHolds().version_generation(), 8u);
    EXPECT_FALSE(LastHolds().has_decided());
  });
}

// A machine that was cut off, and replaced for a while, has promised the step in an attempt that was given up.
TEST_F(NodeMemberSearchTest, APromiseMakesTheStepOfItsOwnAttemptAlone) {
  NodeLeft left;
  left.promised_in = 7;
  for (const uint64_t decided_in : {7, 8, 0}) {
    SCOPED_TRACE(decided_in);
    HearDecidedBehind(left, /*own_step=*/0, /*step=*/1, decided_in);
    EXPECT_EQ(decided_.size(), decided_in == 8 ? 0u : 1u) << "0: an older daemon does not say";
    EXPECT_EQ(asked_.size(), decided_in == 8 ? 1u : 0u) << "it is sent the state";
  }
}

TEST_F(NodeMemberSearchTest, APromiseMakesTheValuesOfItsOwnAttemptAlone) {
  NodeLeft left;
  left.promised_in = 7;
  left.promised_values = true;
  version_ = 4;
  for (const uint64_t agreed_in : {7, 8, 0}) {
    SCOPED_TRACE(agreed_in);
    HearAgreedBehind(left, /*version=*/5, agreed_in);
    EXPECT_EQ(agreed_, agreed_in == 8 ? 0 : 1) << "0: an older daemon does not say";
    EXPECT_EQ(asked_.size(), agreed_in == 8 ? 1u : 0u) << "it is sent the state";
  }
}

// Nobody has made another there; it was promised in one attempt, and said in the next.
TEST_F(NodeMemberSearchTest, WherePartsExistOnceAttemptsOfValuesAreNotCompared) {
  behind_plan_ = testing::NodesPlan(/*nodes=*/6, false, /*cut=*/true);
  NodeLeft left;
  left.promised_in = 7;
  left.promised_values = true;
  version_ = 4;
  HearAgreedBehind(left, /*version=*/5, /*agreed_in=*/8);
  EXPECT_EQ(agreed_, 1);
  EXPECT_THAT(asked_, IsEmpty());
  EXPECT_THAT(closed_, IsEmpty());
}

TEST_F(NodeMemberSearchTest, AVersionThatWasMadeInAnotherAttemptIsSentAnew) {
  version_ = 5;
  version_generation_ = 7;
  for (const uint64_t agreed_in : {7, 8, 0}) {
    SCOPED_TRACE(agreed_in);
    HearAgreedBehind({}, /*version=*/5, agreed_in);
    EXPECT_EQ(asked_.size(), agreed_in == 8 ? 1u : 0u);
    EXPECT_THAT(closed_, IsEmpty());
  }
  HearDecidedBehind({}, /*own_step=*/1, /*step=*/1, /*decided_in=*/7, /*version=*/5);
  EXPECT_THAT(asked_, IsEmpty());
}

// The others have loaded values behind it, which this node would lack.
TEST_F(NodeMemberSearchTest, APromisedStepIsNotMadeBehindLaterValues) {
  NodeLeft left;
  left.promised_in = 7;
  version_ = 4;
  HearDecidedBehind(left, /*own_step=*/0, /*step=*/1, /*decided_in=*/7, /*version=*/5);
  EXPECT_THAT(decided_, ElementsAre(1));
  HearDecidedBehind(left, /*own_step=*/0, /*step=*/1, /*decided_in=*/7, /*version=*/6);
  EXPECT_THAT(decided_, IsEmpty());
  EXPECT_THAT(asked_, ElementsAre(1));
}

TEST_F(NodeMemberSearchTest, AStepThatWasMadeInAnotherAttemptIsSentAnew) {
  NodeLeft left;
  left.decided.set_step(4);
  left.decided.set_generation(7);
  for (const uint64_t decided_in : {7, 8}) {
    SCOPED_TRACE(decided_in);
    HearDecidedBehind(left, /*own_step=*/4, /*step=*/4, decided_in);
    EXPECT_EQ(asked_.size(), decided_in == 8 ? 1u : 0u);
    EXPECT_THAT(closed_, IsEmpty());
  }
}

TEST_F(NodeMemberSearchTest, AnOlderStateIsNotTaken) {
  Begin();
  loop_.RunAndWait([&] {
    HearState(1, 2, 3);
    HearState(1, 3, 4);  // which was not asked any more
    EXPECT_THAT(asked_, ElementsAre(1, 5));
    EXPECT_THAT(taken_, IsEmpty());
    HearState(5, 3, 4);
    EXPECT_THAT(taken_, ElementsAre(3));
  });
}

TEST_F(NodeMemberSearchTest, ASilentSenderIsPassedOverAndANewOneAsked) {
  Begin();
  loop_.RunAndWait([&] {
    member_.CheckSilence(MonotonicNow() + absl::Seconds(60), kLimit);
    EXPECT_THAT(asked_, ElementsAre(1));
    member_.CheckSilence(MonotonicNow() + absl::Seconds(121), kLimit);
    EXPECT_THAT(asked_, ElementsAre(1, 5));
    EXPECT_THAT(links_.ended, ElementsAre(1));
    EXPECT_THAT(closed_, IsEmpty());
  });
}

// It would take that for one more transfer.
TEST_F(NodeMemberSearchTest, AnOlderDaemonIsNotToldThatItsFetchEnds) {
  links_.takes_ends = false;
  Begin();
  loop_.RunAndWait([&] {
    member_.CheckSilence(MonotonicNow() + absl::Seconds(121), kLimit);
    EXPECT_THAT(asked_, ElementsAre(1, 5));
    EXPECT_THAT(links_.ended, IsEmpty());
  });
}

TEST_F(NodeMemberSearchTest, WhoAsksAnotherIsSentNothingMore) {
  Begin();
  loop_.RunAndWait([&] {
    v1::PeerMessage message;
    message.mutable_fetch()->set_transfer(0);
    member_.OnMessage(5, message);
    EXPECT_THAT(stopped_, ElementsAre(5));
  });
}

// A link to node 0 that breaks drops nothing of it.
TEST_F(NodeMemberSearchTest, WhatHasComeIsWhatTheNodeHolds) {
  Begin();
  loop_.RunAndWait([&] {
    EXPECT_FALSE(LastHolds().initialized());
    member_.search()->Came(3, 4);
    Down(0);
    member_.OnUp(0);
    EXPECT_TRUE(member_.fetching());
    EXPECT_TRUE(LastHolds().initialized());
    EXPECT_EQ(LastHolds().step(), 3);
    EXPECT_EQ(LastHolds().version(), 4u);
    Down(1);
    HearBegin();
    EXPECT_THAT(asked_, ElementsAre(1)) << "nobody else is needed";
  });
}

// Pieces and links are read on different threads, so its link may end before the last piece is told.
TEST_F(NodeMemberSearchTest, WhatCameBehindItsSendersEndIsKept) {
  Begin();
  loop_.RunAndWait([&] {
    HearState(1, 3, 4);
    Down(5);
    Down(1);
    member_.search()->Came(3, 4);
    member_.OnUp(5);
    EXPECT_THAT(asked_, ElementsAre(1));
    EXPECT_TRUE(member_.search()->has_come());
  });
}

// A new one that counts what nodes have would go on without it.
TEST_F(NodeMemberSearchTest, ANewNode0HearsAtOnceWhatHasCome) {
  Begin();
  loop_.RunAndWait([&] {
    Down(0);
    member_.OnUp(0);
    EXPECT_FALSE(LastHolds().initialized());
    HearBegin(/*initialized=*/false);
    member_.search()->Came(3, 4);
    member_.StateCame();
    EXPECT_TRUE(LastHolds().initialized());
    EXPECT_EQ(LastHolds().step(), 3);
  });
}

// It would end the attempt of all nodes.
TEST_F(NodeMemberSearchTest, AnOlderNode0HearsOverAnotherLinkWhatHasCome) {
  links_.takes_ends = false;
  Begin();
  loop_.RunAndWait([&] {
    HearBegin(/*initialized=*/false);
    member_.search()->Came(3, 4);
    member_.StateCame();
    EXPECT_FALSE(LastHolds().initialized());
    EXPECT_THAT(links_.renewed, ElementsAre(0));
    Down(0);
    member_.OnUp(0);
    EXPECT_TRUE(LastHolds().initialized());
  });
}

TEST_F(NodeMemberSearchTest, Node0ThatKnowsOfTheStateIsNotToldAgain) {
  Begin();
  loop_.RunAndWait([&] {
    member_.search()->Came(3, 4);
    member_.StateCame();
    EXPECT_FALSE(LastHolds().initialized());
  });
}

// All nodes that had the step are lost but for the one that sent it, and that one since.
TEST_F(NodeMemberSearchTest, AStateThatNode0DoesNotCountIsAskedForElsewhere) {
  Begin();
  loop_.RunAndWait([&] {
    for (const int from : {1, 5, 1, 5}) {
      EXPECT_THAT(closed_, IsEmpty());
      EXPECT_EQ(asked_.back(), from);
      HearState(from, 4, 5);
      member_.search()->Came(4, 5);
      HearBegin();
      member_.Restored();
    }
    ASSERT_EQ(closed_.size(), 1u);
    EXPECT_THAT(closed_[0], HasSubstr("have another state than the others go on from"));
    EXPECT_FALSE(member_.fetching());
  });
}

// Node 0 was away for long, too; but there is no attempt any more that could be given up for that.
TEST_F(NodeMemberSearchTest, NothingFollowsTheSilenceThatEndsTheJob) {
  Begin();
  loop_.RunAndWait([&] {
    Down(0);
    member_.Ready({});  // for node 0, when it is there
    aborts_ = 0;
    member_.CheckSilence(MonotonicNow() + absl::Milliseconds(plan_->config.grace_ms()) + absl::Seconds(1), kLimit);
    ASSERT_EQ(closed_.size(), 1u);
    EXPECT_THAT(closed_[0], AllOf(HasSubstr("the daemon of node 3 (host3:7000)"), HasSubstr("node 1 (host1:7000)"),
                                  HasSubstr("nothing of it has come for")));
    EXPECT_EQ(aborts_, 0);
  });
}

TEST_F(NodeMemberSearchTest, ASearchIsGivenUpWhereNoNodeHasAnything) {
  Begin();
  loop_.RunAndWait([&] {
    HearBegin(/*initialized=*/false);
    for (const int node : {1, 5, 1, 5}) HearState(node, 0, 0);
    EXPECT_EQ(ended_, 1) << "what is under way would be written over initial values";
    EXPECT_FALSE(member_.fetching());
    EXPECT_THAT(closed_, IsEmpty());
  });
}

// Ranks that have trained wait until node 0 has heard all: one of them may have their state.
TEST_F(NodeMemberSearchTest, ItMayBeSentStateWhileNode0HearsOthers) {
  Begin(/*initialized=*/false);
  loop_.RunAndWait([&] {
    EXPECT_TRUE(member_.MayBeSentState());
    v1::PeerMessage message;
    message.mutable_recovering()->set_waits_for("node 2 has not said what it has of the job");
    member_.OnMessage(0, message);
    EXPECT_TRUE(member_.MayBeSentState());
    message.mutable_recovering()->clear_waits_for();
    member_.OnMessage(0, message);
    EXPECT_FALSE(member_.MayBeSentState());
    Down(0);
    EXPECT_TRUE(member_.MayBeSentState());
  });
}

}  // namespace
}  // namespace shardd
