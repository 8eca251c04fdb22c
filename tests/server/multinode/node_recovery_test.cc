// Node 0's daemon is a new one: whom it hears before it settles what the job's step is, and whose state it takes.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/loop/core_loop.h"
#include "server/multinode/node_coordinator.h"
#include "tests/server/multinode/node_world.h"

namespace shardd {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr uint64_t kFirst = 100;  // generation of the new daemon

class NodeRecoveryTest : public ::testing::Test {
 protected:
  explicit NodeRecoveryTest(bool cut = false, int nodes = 3, int row = 0)
      : plan_(testing::NodesPlan(nodes, false, cut, row)) {
    coordinator_ = std::make_unique<NodeCoordinator>(
        plan_, kFirst, [this](int node, v1::PeerMessage message) { sent_.emplace_back(node, std::move(message)); },
        [this] { EXPECT_TRUE(trains_) << "no step is trained here"; }, [this](int from) { asked_.push_back(from); });
    coordinator_->OnUp(0);
    sent_.clear();
  }
  static v1::PeerMessage Holds(int64_t step, uint64_t generation = 50) {
    v1::PeerMessage message;
    v1::PeerMessage::Holds& holds = *message.mutable_holds();
    holds.set_generation(generation);
    holds.set_initialized(true);
    holds.set_step(step);
    if (step > 0) {
      holds.mutable_decided()->set_step(step);
      holds.mutable_decided()->set_grad_norm(static_cast<double>(step));
    }
    return message;
  }
  static v1::PeerMessage Nothing(uint64_t generation = 0) {
    v1::PeerMessage message;
    message.mutable_holds()->set_generation(generation);
    return message;
  }
  static v1::PeerMessage HoldsVersion(int64_t step, uint64_t version, uint64_t made_in) {
    v1::PeerMessage message = Holds(step);
    message.mutable_holds()->set_version(version);
    message.mutable_holds()->set_version_generation(made_in);
    return message;
  }
  void Up(int node, const v1::PeerMessage& holds) {
    coordinator_->OnUp(node);
    coordinator_->OnMessage(node, holds);
  }
  void Down(int node) { coordinator_->OnDown(node, absl::UnavailableError("reset by peer")); }
  void GiveValues(int node) {
    v1::PeerMessage message;
    message.set_generation(coordinator_->generation());
    for (size_t param = 0; param < plan_->params.size(); ++param) message.mutable_values()->add_digests(param);
    coordinator_->OnMessage(node, message);
  }
  // What `node` was sent since the last call, the last of its kind; default: nothing of that kind.
  v1::PeerMessage::Begin BeginOf(int node) {
    v1::PeerMessage::Begin begin;
    for (const auto& [to, message] : sent_) {
      if (to == node && message.has_begin()) begin = message.begin();
    }
    return begin;
  }
  std::string Sent(int node) {
    std::string kinds;
    for (const auto& [to, message] : sent_) {
      if (to != node) continue;
      if (message.has_begin()) {
        absl::StrAppend(&kinds, message.begin().code() == 0 ? "begin " : "next ");
      } else if (message.has_recovering()) {
        absl::StrAppend(&kinds, message.recovering().waits_for().empty() ? "recovering " : "waits ");
      } else if (message.has_all_hold()) {
        kinds += "held ";
      } else {
        absl::StrAppend(&kinds, message.kind_case(), " ");
      }
    }
    return kinds;
  }
  std::string WaitsFor(int node) {
    std::string waits;
    for (const auto& [to, message] : sent_) {
      if (to == node && message.has_recovering()) waits = message.recovering().waits_for();
    }
    return waits;
  }

  const std::shared_ptr<const ShardPlan> plan_;
  std::vector<std::pair<int, v1::PeerMessage>> sent_;
  std::vector<int> asked_;
  bool trains_ = false;
  std::unique_ptr<NodeCoordinator> coordinator_;
};

// A job that takes another's place begins generations anew, by a clock that may be behind an earlier node 0's.
TEST_F(NodeRecoveryTest, GenerationsAreLaterThanTheOneInWhichAnythingWasMade) {
  Up(1, HoldsVersion(4, 6, /*made_in=*/2 * kFirst));
  Up(2, HoldsVersion(4, 6, /*made_in=*/2 * kFirst));
  EXPECT_GT(coordinator_->generation(), 2 * kFirst);
}

TEST_F(NodeRecoveryTest, GenerationsAreLaterThanWhatNode0HasItself) {
  coordinator_->TakeUp(HoldsVersion(4, 6, /*made_in=*/2 * kFirst).holds());
  for (const int node : {1, 2}) Up(node, HoldsVersion(4, 6, /*made_in=*/0));
  EXPECT_GT(coordinator_->generation(), 2 * kFirst);
}

TEST_F(NodeRecoveryTest, TheLatestStepIsTakenWhenAllHaveBeenHeard) {
  Up(1, Holds(4));
  EXPECT_EQ(Sent(1), "waits ");
  EXPECT_THAT(WaitsFor(1), AllOf(HasSubstr("node 2 (host2:7000), which has no link,"), HasSubstr("step 4 of node 1")));
  EXPECT_THAT(asked_, IsEmpty());
  sent_.clear();
  Up(2, Holds(5));
  EXPECT_THAT(asked_, ElementsAre(2));
  EXPECT_EQ(Sent(1), "recovering ");
  EXPECT_EQ(Sent(2), "recovering ");
  sent_.clear();
  coordinator_->Recovered(5);
  for (int node = 0; node < 3; ++node) {
    EXPECT_EQ(Sent(node), "next ");
    EXPECT_EQ(BeginOf(node).generation(), kFirst + 1);
    EXPECT_EQ(BeginOf(node).decided_step(), 5);
    EXPECT_EQ(BeginOf(node).decided().grad_norm(), 5);
    EXPECT_TRUE(BeginOf(node).initialized());
    EXPECT_EQ(BeginOf(node).agreed_generation(), 0u);
  }
  EXPECT_THAT(BeginOf(1).message(), HasSubstr("goes on from step 5 of node 2"));
  EXPECT_EQ(coordinator_->Lacking(), "");
}

TEST_F(NodeRecoveryTest, NobodyHasAnythingAndAllBegin) {
  Up(1, Nothing());
  EXPECT_EQ(Sent(1), "begin ");
  Up(2, Nothing());
  EXPECT_EQ(Sent(2), "begin ");
  sent_.clear();
  for (int node = 0; node < 3; ++node) GiveValues(node);
  EXPECT_THAT(asked_, IsEmpty());
  Down(2);
  Up(2, Nothing(kFirst));
  EXPECT_TRUE(BeginOf(2).initialized());
  EXPECT_EQ(BeginOf(2).agreed_generation(), kFirst);
}

TEST_F(NodeRecoveryTest, AnEmptyNodeTakesPartOnceNode0HasTheState) {
  Up(1, Nothing());
  GiveValues(0);
  GiveValues(1);
  sent_.clear();
  Up(2, Holds(0));
  EXPECT_THAT(asked_, ElementsAre(2)) << "initial values that were committed are a state";
  GiveValues(2);  // nobody says that; it would be of no generation that it was told of, but for this
  sent_.clear();
  coordinator_->Recovered(0);
  for (int node = 0; node < 3; ++node) {
    EXPECT_EQ(Sent(node), "next ");
    EXPECT_TRUE(BeginOf(node).initialized());
    EXPECT_EQ(BeginOf(node).decided_step(), 0);
  }
}

TEST_F(NodeRecoveryTest, TheSenderIsLostAndAnotherTakesItsPlace) {
  Up(1, Holds(5));
  Up(2, Holds(4));
  EXPECT_THAT(asked_, ElementsAre(1));
  sent_.clear();
  Down(1);
  EXPECT_THAT(asked_, ElementsAre(1, -1)) << "node 1 may come back with its step";
  EXPECT_EQ(Sent(0), "next ");
  EXPECT_THAT(BeginOf(0).message(), HasSubstr("node 1 (host1:7000) is lost: reset by peer"));
  EXPECT_FALSE(BeginOf(0).initialized());
  EXPECT_THAT(WaitsFor(2), HasSubstr("node 1 (host1:7000), which has no link,"));
  Up(1, Nothing());  // as another daemon
  EXPECT_THAT(asked_, ElementsAre(1, -1, 2));
  sent_.clear();
  coordinator_->Recovered(4);
  EXPECT_EQ(BeginOf(1).decided_step(), 4);
  EXPECT_EQ(BeginOf(2).decided_step(), 4);
}

TEST_F(NodeRecoveryTest, TheOnlyStateIsLostAndAllBeginAnew) {
  Up(1, Holds(5));
  Up(2, Nothing());
  EXPECT_THAT(asked_, ElementsAre(1));
  Down(1);
  sent_.clear();
  Up(1, Nothing());
  EXPECT_EQ(Sent(1), "begin ");
  EXPECT_FALSE(BeginOf(1).initialized());
  for (int node = 0; node < 3; ++node) GiveValues(node);
  Down(1);
  Up(1, Nothing(coordinator_->generation()));
  EXPECT_TRUE(BeginOf(1).initialized());
}

TEST_F(NodeRecoveryTest, AnotherThanTheSenderMayGoAndCome) {
  Up(1, Holds(5));
  Up(2, Holds(5));
  EXPECT_THAT(asked_, ElementsAre(1));
  Down(2);
  sent_.clear();
  Up(2, Holds(5));
  EXPECT_EQ(Sent(2), "recovering ");
  Down(2);
  coordinator_->Recovered(5);
  sent_.clear();
  Up(2, Holds(5));
  EXPECT_EQ(Sent(2), "begin held ") << "it was the last that was not known to hold it";
  EXPECT_EQ(BeginOf(2).decided_step(), 5);
  EXPECT_THAT(asked_, ElementsAre(1));
}

TEST_F(NodeRecoveryTest, TheNextGenerationExceedsAllThatNodesHaveSeen) {
  Up(1, Nothing(kFirst));  // one of an earlier life
  EXPECT_EQ(BeginOf(1).generation(), kFirst + 1);
  Up(2, Holds(3, kFirst + 70));
  EXPECT_EQ(BeginOf(1).generation(), kFirst + 71);
  EXPECT_THAT(BeginOf(1).message(), HasSubstr("node 2 (host2:7000) has been in a later generation"));
  coordinator_->Recovered(3);
  EXPECT_EQ(BeginOf(2).generation(), kFirst + 72);
}

TEST_F(NodeRecoveryTest, NothingIsToldOfAStepTheSenderWasSent) {
  v1::PeerMessage holds = Holds(5);
  holds.mutable_holds()->clear_decided();
  Up(1, holds);
  Up(2, Holds(4));
  coordinator_->Recovered(5);
  EXPECT_EQ(BeginOf(2).decided_step(), 5);
  EXPECT_FALSE(BeginOf(2).has_decided());
}

TEST_F(NodeRecoveryTest, WhomRanksWaitForIsNamedAndEndsTheirAttempt) {
  Up(1, Holds(4));
  GiveValues(0);
  EXPECT_THAT(coordinator_->Waiting(), AllOf(HasSubstr("node 2 (host2:7000)"), HasSubstr("step 4 of node 1")));
  EXPECT_EQ(coordinator_->Lacking(), coordinator_->Waiting());
  sent_.clear();
  const absl::Time now = MonotonicNow();
  coordinator_->CheckSilence(now + absl::Minutes(3), absl::Minutes(2));
  EXPECT_EQ(Sent(0), "next ");
  EXPECT_THAT(BeginOf(0).message(), AllOf(HasSubstr("node 2 (host2:7000)"), HasSubstr("limit 2m")));
  EXPECT_EQ(Sent(1), "") << "it is no part of the attempt";
  sent_.clear();
  coordinator_->CheckSilence(now + absl::Minutes(9), absl::Minutes(2));
  EXPECT_EQ(Sent(0), "") << "nobody waits";
  Up(2, Holds(4));
  GiveValues(0);
  coordinator_->CheckSilence(now + absl::Minutes(12), absl::Minutes(2));
  EXPECT_EQ(Sent(0), "") << "a transfer takes as long as it takes";
}

TEST_F(NodeRecoveryTest, AnotherJobOfTheNameIsNamedToAllWaiting) {
  Up(1, Holds(4));
  sent_.clear();
  coordinator_->OnRefused(2, absl::FailedPreconditionError("node 2 describes another job: layout"));
  EXPECT_THAT(WaitsFor(1), HasSubstr("describes another job: layout"));
  GiveValues(0);
  EXPECT_THAT(BeginOf(0).message(), AllOf(HasSubstr("node 2 (host2:7000)"), HasSubstr("describes another job")));
}

class NodeRecoveryOfCut : public NodeRecoveryTest {
 protected:
  NodeRecoveryOfCut() : NodeRecoveryTest(/*cut=*/true) {}
};

// They serve the others, and one of them may be the only one that has heard what was agreed on.
TEST_F(NodeRecoveryOfCut, NodesThatHaveFinishedAreHeard) {
  v1::PeerMessage holds = Holds(9);
  holds.mutable_holds()->set_version(10);
  v1::PeerMessage own = holds;
  own.mutable_holds()->set_promised_version(11);
  coordinator_->TakeUp(own.holds());
  v1::PeerMessage finished = holds;
  finished.mutable_holds()->add_finished(2);
  Up(1, finished);
  EXPECT_EQ(Sent(1), "waits ") << "node 2 has finished, and may know more";
  sent_.clear();
  coordinator_->OnUp(2);
  coordinator_->OnFinished(2);
  holds.mutable_holds()->set_version(11);
  coordinator_->OnMessage(2, holds);
  EXPECT_EQ(BeginOf(1).version(), 11u) << "what node 0 has promised is a version";
}

// Two rows of two.
class NodeRecoveryOfRows : public NodeRecoveryTest {
 protected:
  NodeRecoveryOfRows() : NodeRecoveryTest(/*cut=*/true, 4, 2) {}
};

// Only node 2 has what node 0 held, and hears here that the step is decided.
TEST_F(NodeRecoveryOfRows, Node0GoesOnWithWhatAnyNodeKnows) {
  Up(1, Nothing());
  Up(2, Holds(4));
  EXPECT_EQ(Sent(2), "waits ");
  sent_.clear();
  Up(3, Holds(5));
  EXPECT_THAT(asked_, IsEmpty()) << "node 3 has another place";
  for (int node = 0; node < 4; ++node) {
    EXPECT_EQ(BeginOf(node).decided_step(), 5);
    EXPECT_EQ(BeginOf(node).decided().grad_norm(), 5);
    EXPECT_TRUE(BeginOf(node).initialized());
  }
  EXPECT_THAT(coordinator_->Unheld(), HasSubstr("node 0 (host0:7000)"));
}

TEST_F(NodeRecoveryOfRows, AStepIsShownWhenTheLostHoldItAgain) {
  Up(1, Nothing());
  Up(2, Holds(5));
  Up(3, Holds(5));
  v1::PeerMessage held;
  held.mutable_held()->set_step(5);
  coordinator_->SetFetching(1, false);
  coordinator_->OnMessage(1, held);
  EXPECT_EQ(Sent(2).find("held"), std::string::npos) << Sent(2);
  coordinator_->SetFetching(0, false, 5);
  EXPECT_NE(Sent(2).find("held"), std::string::npos) << Sent(2);
}

// Its custodian has kept what it had before it was cut off and replaced.
TEST_F(NodeRecoveryOfRows, Node0ThatComesBackOlderIsSentTheNewerState) {
  coordinator_->TakeUp(Holds(4).holds());
  for (const int node : {1, 2}) Up(node, Holds(5));
  sent_.clear();
  Up(3, Holds(5));
  EXPECT_TRUE(BeginOf(0).initialized());
  EXPECT_EQ(BeginOf(0).decided_step(), 5);
  EXPECT_EQ(Sent(0), "next ") << "it hears of no beginning without parameters";
  EXPECT_THAT(asked_, IsEmpty());
  EXPECT_THAT(coordinator_->Unheld(), HasSubstr("node 0 (host0:7000)"));
}

// Who has promised it in another attempt has other sums for it.
TEST_F(NodeRecoveryOfRows, ADecidedStepSaysInWhichAttempt) {
  coordinator_->TakeUp(Holds(4).holds());
  for (const int node : {1, 2, 3}) Up(node, Holds(4));
  trains_ = true;
  v1::PeerMessage closed;
  closed.set_generation(coordinator_->generation());
  closed.mutable_closed()->set_step(5);
  closed.mutable_closed()->set_backwards(std::numeric_limits<int32_t>::max());
  closed.mutable_closed()->mutable_ranks_step()->add_groups()->set_lr(0.5);
  for (int node = 0; node < 4; ++node) coordinator_->OnMessage(node, closed);
  v1::PeerMessage reduced;
  reduced.set_generation(coordinator_->generation());
  reduced.mutable_reduced()->set_step(5);
  reduced.mutable_reduced()->set_present(std::string((plan_->params.size() + 7) / 8, '\1'));
  for (int node = 0; node < 4; ++node) coordinator_->OnMessage(node, reduced);
  v1::PeerMessage::Decided decided;
  decided.set_step(5);
  decided.set_grad_norm(5);
  coordinator_->Decide(decided);
  const uint64_t decided_in = coordinator_->generation();
  Down(2);
  EXPECT_EQ(BeginOf(1).decided().generation(), decided_in);
  EXPECT_GT(BeginOf(1).generation(), decided_in);
}

// A machine that was cut off has made the version before the others made it anew.
TEST_F(NodeRecoveryOfRows, OfTwoAttemptsTheLaterOneCounts) {
  Up(1, HoldsVersion(5, 7, 70));
  Up(2, HoldsVersion(5, 7, 80));
  Up(3, HoldsVersion(6, 7, 70));
  for (int node = 0; node < 4; ++node) {
    EXPECT_EQ(BeginOf(node).decided_step(), 5) << "step 6 is not the version that the others have made";
    EXPECT_EQ(BeginOf(node).version(), 7u);
    EXPECT_EQ(BeginOf(node).version_generation(), 80u);
  }
  v1::PeerMessage held;
  held.mutable_held()->set_step(5);
  coordinator_->SetFetching(0, false, 5);
  EXPECT_THAT(coordinator_->Unheld(), HasSubstr("node 1 (host1:7000)")) << "it is sent the state first";
  EXPECT_TRUE(coordinator_->SomeFetch());
  for (const int node : {1, 3}) {
    coordinator_->SetFetching(node, false);
    coordinator_->OnMessage(node, held);
  }
  EXPECT_EQ(coordinator_->Unheld(), "");
  EXPECT_FALSE(coordinator_->SomeFetch());
}

TEST_F(NodeRecoveryOfRows, AVersionMadeInAnotherAttemptIsHeldByNobody) {
  coordinator_->TakeUp(HoldsVersion(5, 7, 80).holds());
  for (const int node : {1, 2, 3}) Up(node, HoldsVersion(5, 7, 80));
  coordinator_->SetFetching(0, false, 5);
  EXPECT_FALSE(coordinator_->SomeFetch());
  Down(3);
  Up(3, HoldsVersion(5, 7, 70));
  EXPECT_TRUE(coordinator_->SomeFetch()) << "it is about to be sent the state";
}

TEST_F(NodeRecoveryOfRows, Node0MakesTheValuesOfItsOwnAttemptAlone) {
  for (const uint64_t agreed_in : {50, 60}) {
    coordinator_ = std::make_unique<NodeCoordinator>(
        plan_, kFirst, [this](int node, v1::PeerMessage message) { sent_.emplace_back(node, std::move(message)); },
        [] {}, [](int) {});
    v1::PeerMessage own = HoldsVersion(5, 6, 40);
    own.mutable_holds()->set_promised_version(7);
    coordinator_->TakeUp(own.holds());
    coordinator_->OnUp(0);
    for (const int node : {1, 2, 3}) Up(node, HoldsVersion(5, 7, agreed_in));
    EXPECT_EQ(BeginOf(0).version_generation(), agreed_in);
    EXPECT_EQ(coordinator_->MayRecover(), agreed_in == 60) << "it promised them in generation 50";
  }
}

// Ranks that have trained wait for as long as one that is not heard may have their state.
TEST_F(NodeRecoveryOfRows, WhoHasNothingIsToldWhomNode0Hears) {
  Up(1, Nothing());
  EXPECT_THAT(WaitsFor(1), HasSubstr("node 2 (host2:7000) has not said"));
  Up(2, Nothing());
  EXPECT_THAT(WaitsFor(1), HasSubstr("node 3 (host3:7000) has not said"));
  EXPECT_TRUE(coordinator_->MayRecover());
  Up(3, Nothing());
  EXPECT_EQ(WaitsFor(1), "") << "nobody has anything";
  EXPECT_FALSE(coordinator_->MayRecover());
}

TEST_F(NodeRecoveryOfRows, OthersWaitForAsLongAsALostNodeIsSentItsPart) {
  Up(1, Holds(5));
  Up(2, Holds(5));
  Up(3, Nothing());
  coordinator_->SetFetching(0, false, 5);
  v1::PeerMessage closed;
  closed.set_generation(coordinator_->generation());
  closed.mutable_closed()->set_step(6);
  closed.mutable_closed()->set_backwards(1);
  for (const int node : {0, 1, 2}) coordinator_->OnMessage(node, closed);
  sent_.clear();
  const absl::Time now = MonotonicNow();
  coordinator_->CheckSilence(now + absl::Minutes(9), absl::Minutes(2));
  EXPECT_EQ(Sent(1), "") << "node 3 is sent its part";
  coordinator_->SetFetching(3, false);
  coordinator_->CheckSilence(now + absl::Minutes(20), absl::Minutes(2));
  EXPECT_THAT(BeginOf(1).message(), HasSubstr("node 3 (host3:7000) has not closed backward 0"));
}

TEST_F(NodeRecoveryTest, NodesThatHaveFinishedAreNotWaitedFor) {
  v1::PeerMessage holds = Holds(9);
  holds.mutable_holds()->add_finished(2);
  Up(1, holds);
  EXPECT_THAT(asked_, ElementsAre(1));
  coordinator_->Recovered(9);
  Up(2, Nothing());  // it came again, and takes part
  EXPECT_EQ(BeginOf(2).decided_step(), 9);
}

TEST_F(NodeRecoveryTest, ASenderThatFinishesIsAskedNoMore) {
  Up(1, Holds(9));
  coordinator_->OnFinished(1);
  Down(1);
  sent_.clear();
  Up(2, Nothing());
  EXPECT_EQ(Sent(2), "begin ") << "it has taken the state with it";
  EXPECT_THAT(asked_, IsEmpty());
}

TEST_F(NodeRecoveryTest, WhatANodeCannotHaveIsNoState) {
  const auto with = [](void (*change)(v1::PeerMessage::Holds*)) {
    v1::PeerMessage message = Holds(4);
    change(message.mutable_holds());
    return message;
  };
  const std::vector<v1::PeerMessage> malformed = {
      with([](auto* holds) { holds->set_step(-1); }),
      with([](auto* holds) { holds->set_initialized(false); }),
      with([](auto* holds) { holds->mutable_decided()->set_step(3); }),
      with([](auto* holds) { holds->set_generation(~uint64_t{0}); }),
      with([](auto* holds) { holds->add_finished(3); }),
      with([](auto* holds) { holds->add_finished(-1); }),
  };
  for (const v1::PeerMessage& message : malformed) {
    SCOPED_TRACE(message.ShortDebugString());
    sent_.clear();
    Up(1, message);
    EXPECT_THAT(BeginOf(0).message(), AllOf(HasSubstr("node 1 (host1:7000)"), HasSubstr("cannot have")));
    EXPECT_EQ(Sent(1), "");
    EXPECT_EQ(coordinator_->Lacking(), "");
    Down(1);
  }
  sent_.clear();
  coordinator_->OnMessage(1, Holds(4));
  EXPECT_THAT(BeginOf(0).message(), HasSubstr("cannot have")) << "it has no link";
  Up(1, Holds(4));
  sent_.clear();
  coordinator_->OnMessage(1, Holds(3));
  EXPECT_THAT(BeginOf(0).message(), HasSubstr("said it twice"));
  EXPECT_THAT(coordinator_->Lacking(), AllOf(HasSubstr("step 4"), Not(HasSubstr("step 3"))));
}

}  // namespace
}  // namespace shardd
