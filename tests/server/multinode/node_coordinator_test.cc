// Node 0's state machine: messages in, messages out.

#include "server/multinode/node_coordinator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/job/work/given_back.h"
#include "server/loop/core_loop.h"
#include "server/multinode/backwards.h"
#include "tests/server/multinode/node_world.h"

namespace shardd {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int kRoot = 0;  // groups: of two parameters, of one, of one
constexpr int kA = 1;
constexpr int kB = 2;

class NodeCoordinatorTest : public ::testing::Test {
 protected:
  explicit NodeCoordinatorTest(int nodes = 2, bool allow_missing = false, bool cut = false)
      : plan_(testing::NodesPlan(nodes, allow_missing, cut)) {
    Anew();
  }
  void Anew() {
    sent_.clear();
    decides_ = 0;
    coordinator_ = std::make_unique<NodeCoordinator>(
        plan_, /*generation=*/1,
        [this](int node, v1::PeerMessage message) { sent_.emplace_back(node, std::move(message)); },
        [this] { ++decides_; }, [](int) { ADD_FAILURE() << "nobody has a state (node_recovery_test.cc)"; });
    for (int node = 0; node < plan_->nodes(); ++node) Up(node);
    sent_.clear();
  }
  // As a node that has nothing.
  void Up(int node) {
    coordinator_->OnUp(node);
    v1::PeerMessage message;
    message.mutable_holds();
    if (node != 0) coordinator_->OnMessage(node, message);
  }
  void Initialize() {
    for (int node = 0; node < plan_->nodes(); ++node) Say(node, Values());
    EXPECT_EQ(Kinds(1), "values_agreed ");
    sent_.clear();
  }
  // Of the generation that counts.
  void Say(int node, v1::PeerMessage message) {
    message.set_generation(coordinator_->generation());
    coordinator_->OnMessage(node, message);
  }

  v1::PeerMessage Values(uint64_t last = 10, uint64_t version = 0) const {
    v1::PeerMessage message;
    message.mutable_values()->set_version(version);
    for (size_t param = 1; param < plan_->params.size(); ++param) message.mutable_values()->add_digests(param);
    message.mutable_values()->add_digests(last);
    return message;
  }
  v1::PeerMessage Ready(int group, int backward = 0, int occurrence = 0) const {
    v1::PeerMessage message;
    v1::SumKey& key = *message.mutable_ready()->mutable_key();
    key.set_step(step_);
    key.set_backward(backward);
    key.set_group(group);
    key.set_occurrence(occurrence);
    message.mutable_ready()->mutable_gives()->set_present(group == kRoot ? "\x03" : "\x01");
    message.mutable_ready()->mutable_gives()->set_fresh(std::string(1, '\0'));
    return message;
  }
  v1::PeerMessage Closed(int backwards, double lr = 0.5) const {
    v1::PeerMessage message;
    message.mutable_closed()->set_step(step_);
    message.mutable_closed()->set_backwards(backwards);
    if (backwards == kAllBackwards) message.mutable_closed()->mutable_ranks_step()->add_groups()->set_lr(lr);
    return message;
  }
  v1::PeerMessage Reduced(const std::string& present = "\x0f") const {
    v1::PeerMessage message;
    message.mutable_reduced()->set_step(step_);
    message.mutable_reduced()->set_present(present);
    return message;
  }
  static v1::PeerMessage Held(int64_t step) {
    v1::PeerMessage message;
    message.mutable_held()->set_step(step);
    return message;
  }
  v1::PeerMessage Abandoned(const std::string& why) const {
    v1::PeerMessage message;
    message.mutable_abandoned()->set_code(static_cast<int>(absl::StatusCode::kAborted));
    message.mutable_abandoned()->set_message(why);
    return message;
  }
  v1::PeerMessage::Decided Decided() const {
    v1::PeerMessage::Decided decided;
    decided.set_step(step_);
    decided.set_grad_norm(1.5);
    return decided;
  }
  // A whole step, to its decision. False: it was not decided.
  bool TrainsAStep() {
    sent_.clear();
    const int before = decides_;
    for (int node = 0; node < plan_->nodes(); ++node) {
      Say(node, Ready(kA));
      Say(node, Closed(1));
      Say(node, Closed(kAllBackwards));
    }
    for (int node = 0; node < plan_->nodes(); ++node) Say(node, Reduced());
    if (decides_ != before + 1) return false;
    coordinator_->Decide(Decided());
    for (int node = 1; node < plan_->nodes(); ++node) {
      if (!coordinator_->Unheld().empty()) Say(node, Held(step_));
    }
    const bool right = Kinds(1) == "go 0:1.0 closed 1 closed all decided held " &&
                       Kinds(0) == "go 0:1.0 closed 1 closed all held " && coordinator_->Unheld().empty();
    ++step_;
    sent_.clear();
    return right;
  }

  // What was sent to a node, in short.
  std::string Kinds(int to) const {
    std::string text;
    for (const auto& [node, message] : sent_) {
      if (node != to) continue;
      switch (message.kind_case()) {
        case v1::PeerMessage::kGo: {
          const v1::SumKey& key = message.go().key();
          EXPECT_EQ(message.go().gives_size(), plan_->nodes());
          EXPECT_EQ(key.step(), step_);
          absl::StrAppend(&text, "go ", key.backward(), ":", key.group(), ".", key.occurrence(), " ");
          break;
        }
        case v1::PeerMessage::kAllClosed:
          absl::StrAppend(&text, "closed ",
                          message.all_closed().backwards() == kAllBackwards
                              ? "all"
                              : absl::StrCat(message.all_closed().backwards()),
                          " ");
          break;
        case v1::PeerMessage::kMayWrite:
          absl::StrAppend(&text, "may write ", message.may_write().times(), " ");
          break;
        case v1::PeerMessage::kDecided:
          text += "decided ";
          break;
        case v1::PeerMessage::kAllHold:
          text += "held ";
          break;
        case v1::PeerMessage::kValuesAgreed:
          text += "values_agreed ";
          break;
        case v1::PeerMessage::kBegin:
          text += "begin ";
          break;
        default:
          text += "something else ";
      }
    }
    return text;
  }
  std::vector<uint64_t> Sequences(int to) const {
    std::vector<uint64_t> sequences;
    for (const auto& [node, message] : sent_) {
      if (node == to && message.has_go()) sequences.push_back(message.go().sequence());
    }
    return sequences;
  }
  // Why the generation ended, if it did by the last message: told to every node that is up.
  std::string EndedBecause() {
    std::string why;
    int told = 0;
    for (const auto& [node, message] : sent_) {
      if (!message.has_begin() || message.begin().code() == 0) continue;
      EXPECT_EQ(message.begin().generation(), coordinator_->generation());
      EXPECT_EQ(message.generation(), coordinator_->generation());
      why = message.begin().message();
      ++told;
    }
    int up = 0;
    for (int node = 0; node < plan_->nodes(); ++node) up += coordinator_->takes_part(node) ? 1 : 0;
    EXPECT_TRUE(told == 0 || told == up) << told << " of " << up;
    sent_.clear();
    return why;
  }
  v1::PeerMessage::Begin LastBegin() const {
    return sent_.empty() ? v1::PeerMessage::Begin() : sent_.back().second.begin();
  }

  const std::shared_ptr<const ShardPlan> plan_;
  int64_t step_ = 1;
  std::vector<std::pair<int, v1::PeerMessage>> sent_;
  int decides_ = 0;
  std::unique_ptr<NodeCoordinator> coordinator_;
};

class NodeCoordinatorOfThree : public NodeCoordinatorTest {
 protected:
  NodeCoordinatorOfThree() : NodeCoordinatorTest(3) { Initialize(); }
};
class NodeCoordinatorOfTwo : public NodeCoordinatorTest {
 protected:
  NodeCoordinatorOfTwo() { Initialize(); }
};
class NodeCoordinatorMissing : public NodeCoordinatorTest {
 protected:
  NodeCoordinatorMissing() : NodeCoordinatorTest(2, /*allow_missing=*/true) { Initialize(); }
};

TEST_F(NodeCoordinatorOfThree, SumsGoInTheOrderInWhichTheyAreComplete) {
  Say(0, Ready(kA));
  Say(0, Ready(kB));
  Say(1, Ready(kB));
  Say(1, Ready(kA));
  EXPECT_THAT(sent_, IsEmpty());
  Say(2, Ready(kB));
  Say(0, Ready(kRoot));
  Say(2, Ready(kA));
  Say(2, Ready(kRoot));
  Say(1, Ready(kRoot));
  for (int node = 0; node < 3; ++node) {
    EXPECT_EQ(Kinds(node), "go 0:2.0 go 0:1.0 go 0:0.0 ");
    EXPECT_THAT(Sequences(node), ElementsAre(0, 1, 2));
  }
}

TEST_F(NodeCoordinatorOfThree, WhatEachNodeGivesIsToldToAll) {
  for (int node = 0; node < 3; ++node) {
    v1::PeerMessage ready = Ready(kRoot);
    ready.mutable_ready()->mutable_gives()->set_present(std::string(1, static_cast<char>(node + 1)));
    Say(node, ready);
  }
  ASSERT_EQ(Kinds(2), "go 0:0.0 ");
  for (int node = 0; node < 3; ++node) {
    EXPECT_EQ(sent_[0].second.go().gives(node).present(), std::string(1, static_cast<char>(node + 1)));
  }
}

TEST_F(NodeCoordinatorOfTwo, StepsFollowOneAnotherInOneGeneration) {
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(TrainsAStep()) << i;
  EXPECT_EQ(coordinator_->generation(), 1u);
}

TEST_F(NodeCoordinatorOfTwo, ASequenceHasNoGapsAndRestartsWithAGeneration) {
  EXPECT_TRUE(TrainsAStep());
  Say(0, Ready(kA));
  Say(1, Ready(kA));
  EXPECT_THAT(Sequences(1), ElementsAre(1));
  Say(1, Abandoned("rank 3 is lost"));
  EXPECT_EQ(EndedBecause(), "node 1 (host1:7000): rank 3 is lost");
  Say(0, Ready(kA));
  Say(1, Ready(kA));
  EXPECT_THAT(Sequences(0), ElementsAre(0));
}

TEST_F(NodeCoordinatorOfTwo, AGroupThatANodeLeavesOutIsNamed) {
  Say(0, Ready(kA));
  Say(1, Closed(1));
  EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("node 1 (host1:7000)"), HasSubstr("\"a\""), HasSubstr("backward 0"),
                                    HasSubstr("node 0 gave"), HasSubstr("allow_missing_contribution")));
  EXPECT_TRUE(TrainsAStep());
}

TEST_F(NodeCoordinatorOfTwo, TheSameWhereItIsGivenBehindTheClosing) {
  Say(0, Closed(1));
  Say(1, Ready(kA));
  EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("node 0 (host0:7000)"), HasSubstr("\"a\""), HasSubstr("node 1 gave")));
  EXPECT_TRUE(TrainsAStep());
}

TEST_F(NodeCoordinatorMissing, OthersReduceAGroupThatANodeLeavesOut) {
  Say(0, Ready(kA));
  Say(0, Ready(kRoot));
  Say(1, Ready(kRoot));
  EXPECT_EQ(Kinds(1), "go 0:0.0 ");
  sent_.clear();
  Say(1, Closed(1));
  EXPECT_EQ(Kinds(0), "go 0:1.0 ");
  EXPECT_EQ(sent_[0].second.go().gives(1).present(), std::string(1, '\0'));
  sent_.clear();
  Say(0, Ready(kB));  // at once: node 1 gives nothing any more
  Say(0, Closed(1));
  EXPECT_EQ(Kinds(1), "go 0:2.0 closed 1 ");
}

TEST_F(NodeCoordinatorOfTwo, ASecondSubmissionOfOneNodeAloneIsNoError) {
  Say(0, Ready(kA));
  Say(1, Ready(kA));
  Say(0, Ready(kA, 0, 1));
  EXPECT_EQ(Kinds(1), "go 0:1.0 ");
  Say(1, Closed(1));
  Say(0, Closed(1));
  EXPECT_EQ(Kinds(1), "go 0:1.0 go 0:1.1 closed 1 ");
}

TEST_F(NodeCoordinatorOfThree, BackwardsCloseWhereTheLastNodeHas) {
  Say(0, Closed(2));
  Say(1, Closed(1));
  EXPECT_EQ(Kinds(1), "");
  Say(2, Closed(kAllBackwards));
  EXPECT_EQ(Kinds(1), "closed 1 ");
  Say(1, Closed(kAllBackwards));
  EXPECT_EQ(Kinds(1), "closed 1 closed 2 ");
  Say(0, Closed(kAllBackwards));
  EXPECT_EQ(Kinds(1), "closed 1 closed 2 closed all ");
}

TEST_F(NodeCoordinatorOfTwo, HyperparametersThatDifferAreNamed) {
  Say(0, Closed(kAllBackwards, 0.5));
  Say(1, Closed(kAllBackwards, 0.25));
  EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("Step 1"), HasSubstr("node 1"), HasSubstr("0.25"), HasSubstr("0.5")));
  EXPECT_TRUE(TrainsAStep());
}

TEST_F(NodeCoordinatorOfTwo, GradientsThatOneNodeDroppedAreNamed) {
  for (int node = 0; node < 2; ++node) Say(node, Closed(kAllBackwards));
  Say(1, Reduced("\x0f"));
  Say(0, Reduced("\x0d"));
  EXPECT_THAT(EndedBecause(),
              AllOf(HasSubstr("\"bias\""), HasSubstr("there on node 1"), HasSubstr("dropped on node 0")));
  EXPECT_EQ(decides_, 0);
  EXPECT_TRUE(TrainsAStep());
}

TEST_F(NodeCoordinatorTest, DifferingInitialValuesAreNamedAndMayBeGivenAnew) {
  Say(1, Values(11));
  Say(0, Values(12));
  EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("\"b.w\""), HasSubstr("node 1"), HasSubstr("same seed")));
  Say(0, Ready(kA));
  EXPECT_THAT(EndedBecause(), HasSubstr("initial values first"));
  Initialize();
  EXPECT_TRUE(TrainsAStep());
  Say(1, Values());
  EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("node 1"), HasSubstr("initial values")));
}

TEST_F(NodeCoordinatorOfThree, LaterValuesAreAVersionWhereAllNodesGiveTheSame) {
  EXPECT_TRUE(TrainsAStep());
  for (const uint64_t version : {3u, 4u}) {
    sent_.clear();
    for (int node = 0; node < 3; ++node) Say(node, Values(10 + version, version));
    EXPECT_EQ(Kinds(1), "values_agreed ");
  }
  EXPECT_TRUE(TrainsAStep());
  Say(1, Values(20, 6));
  EXPECT_THAT(coordinator_->Waiting(), AllOf(HasSubstr("node 0"), HasSubstr("the values that others write")));
  Say(0, Values(21, 6));
  Say(2, Values(21, 6));
  EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("the value of \"b.w\""), HasSubstr("node 1")));
  Say(1, Values(20, 7));
  EXPECT_THAT(EndedBecause(), HasSubstr("want version 6"));
  for (int node = 0; node < 3; ++node) Say(node, Closed(kAllBackwards));
  Say(1, Values(20, 6));
  EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("node 1"), HasSubstr("not its turn")));
}

class NodeCoordinatorOfCut : public NodeCoordinatorTest {
 protected:
  NodeCoordinatorOfCut() : NodeCoordinatorTest(2, /*allow_missing=*/false, /*cut=*/true) {}
  v1::PeerMessage AsksToWrite(uint64_t version, int times = 1) const {
    v1::PeerMessage message;
    message.mutable_asks_to_write()->set_version(version);
    message.mutable_asks_to_write()->set_times(times);
    return message;
  }
  v1::PeerMessage Enters(uint64_t version, int times, bool edited) const {
    v1::PeerMessage message = AsksToWrite(version, times);
    message.mutable_asks_to_write()->set_of_pass(true);
    message.mutable_asks_to_write()->set_edited(edited);
    return message;
  }
};

TEST_F(NodeCoordinatorOfCut, ValuesAreWrittenWhenNobodyReadsTheVersionBefore) {
  Initialize();
  Say(1, AsksToWrite(2));
  EXPECT_THAT(sent_, IsEmpty());
  EXPECT_THAT(coordinator_->Waiting(), AllOf(HasSubstr("node 0"), HasSubstr("has not asked to write values")));
  Say(0, AsksToWrite(2));
  EXPECT_EQ(Kinds(0) + Kinds(1), "may write 1 may write 1 ");
  EXPECT_EQ(coordinator_->Waiting(), "");
  sent_.clear();
  Say(0, AsksToWrite(2, 2));  // its ranks have left without a commit
  EXPECT_THAT(sent_, IsEmpty());
  Say(1, AsksToWrite(2, 2));
  EXPECT_EQ(Kinds(1), "may write 2 ");
  sent_.clear();
  for (int node = 0; node < 2; ++node) Say(node, Values(10, 2));
  EXPECT_EQ(Kinds(1), "values_agreed ");
  sent_.clear();
  Say(1, AsksToWrite(3));
  Say(0, AsksToWrite(3));
  EXPECT_EQ(Kinds(1), "may write 1 ");
}

TEST_F(NodeCoordinatorOfCut, NodesWriteTheSameTogether) {
  for (const auto change : {+[](v1::PeerMessage::AsksToWrite* asks) { asks->set_group(1); },
                            +[](v1::PeerMessage::AsksToWrite* asks) { asks->set_recurse(true); },
                            +[](v1::PeerMessage::AsksToWrite* asks) { asks->set_rank0_only(true); },
                            +[](v1::PeerMessage::AsksToWrite* asks) { asks->set_of_edits(true); }}) {
    Anew();
    Initialize();
    v1::PeerMessage other = AsksToWrite(2);
    change(other.mutable_asks_to_write());
    Say(0, AsksToWrite(2));
    Say(1, other);
    EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("EnterFullParams: node 1"), HasSubstr("than node 0 (got ")));
  }
}

// They would wait for each other.
TEST_F(NodeCoordinatorOfCut, NodesThatStepWhileOthersWriteAreNamed) {
  Initialize();
  Say(0, AsksToWrite(2));
  Say(1, Closed(kAllBackwards));
  EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("OptimizerStep: nodes differ"), HasSubstr("a step, on node 1"),
                                    HasSubstr("write, on node 0")));
  Say(1, Closed(kAllBackwards));
  Say(0, AsksToWrite(2));
  EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("CommitParameters: nodes differ"), HasSubstr("write, on node 0"),
                                    HasSubstr("a step, on node 1")));
  for (int node = 0; node < 2; ++node) Say(node, AsksToWrite(2));
  EXPECT_EQ(Kinds(1), "may write 1 ");
  sent_.clear();
  Say(0, Closed(kAllBackwards));
  EXPECT_EQ(Kinds(1), "") << "its ranks may have left without a commit";
}

TEST_F(NodeCoordinatorOfTwo, ReplicasThatStepWhileOthersWriteAreNamed) {
  EXPECT_TRUE(TrainsAStep());
  sent_.clear();
  Say(0, Values(10, 3));
  Say(1, Closed(kAllBackwards));
  EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("a step, on node 1"), HasSubstr("write, on node 0")));
}

TEST_F(NodeCoordinatorOfTwo, ReplicasThatComputeWhileOthersWriteAreNamed) {
  for (const bool first : {true, false}) {
    Anew();
    Initialize();
    Say(1, Ready(kA));
    Say(0, Ready(kA));  // its gradients of this backward have gone
    for (int node = 0; node < 2; ++node) Say(node, Closed(1));
    sent_.clear();
    if (first) Say(0, Values(10, 2));
    Say(1, Ready(kB, 1));
    if (!first) Say(0, Values(10, 2));
    EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("which they write, on node 0"), HasSubstr("backward 1"),
                                      HasSubstr("on node 1"), HasSubstr("between the same")));
  }
}

// A node that writes has given its parts of the backward that others are still in.
TEST_F(NodeCoordinatorOfTwo, ReplicasWriteBehindABackwardThatOthersAreIn) {
  Say(0, Ready(kA));
  Say(0, Closed(1));
  Say(0, Values(10, 2));
  Say(1, Ready(kA));
  Say(1, Closed(1));
  sent_.clear();
  Say(1, Values(10, 2));
  EXPECT_EQ(Kinds(1), "values_agreed ");
}

TEST_F(NodeCoordinatorOfCut, NodesThatComputeWhileOthersAskToWriteAreNamed) {
  for (const bool first : {true, false}) {
    Anew();
    Initialize();
    for (int node = 0; node < 2; ++node) Say(node, Ready(kA));
    for (int node = 0; node < 2; ++node) Say(node, Closed(1));
    sent_.clear();
    if (first) Say(0, AsksToWrite(2));
    Say(1, Ready(kB, 1));
    if (!first) Say(0, AsksToWrite(2));
    EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("which they write, on node 0"), HasSubstr("backward 1")));
    if (first) Say(0, Enters(2, 1, /*edited=*/false));
    Say(1, Ready(kB));
    if (!first) Say(0, Enters(2, 1, /*edited=*/false));
    EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("EnterPass: nodes differ"), HasSubstr("which they enter, on node 0"),
                                      HasSubstr("backward 0")));
  }
}

TEST_F(NodeCoordinatorOfCut, NodesEnterPassesTogetherAndHearWhetherAnyHasEdited) {
  Initialize();
  Say(0, Enters(2, 1, /*edited=*/false));
  EXPECT_THAT(sent_, IsEmpty());
  EXPECT_THAT(coordinator_->Waiting(), AllOf(HasSubstr("node 1"), HasSubstr("has not entered the pass")));
  Say(1, Enters(2, 1, /*edited=*/true));
  EXPECT_EQ(Kinds(0) + Kinds(1), "may write 1 may write 1 ");
  EXPECT_TRUE(sent_.back().second.may_write().edited());
  sent_.clear();
  Say(0, AsksToWrite(2, 2));
  EXPECT_THAT(coordinator_->Waiting(), AllOf(HasSubstr("node 1"), HasSubstr("has not asked to write values")));
  Say(1, AsksToWrite(2, 2));
  for (int node = 0; node < 2; ++node) Say(node, Values(10, 2));
  EXPECT_EQ(Kinds(1), "may write 2 values_agreed ");
  sent_.clear();
  for (int node = 0; node < 2; ++node) Say(node, Enters(3, 1, /*edited=*/false));
  EXPECT_FALSE(sent_.back().second.may_write().edited());
  const absl::Time now = MonotonicNow();
  Say(0, Closed(1));  // whoever computes is waited for no longer than otherwise
  coordinator_->CheckSilence(now + absl::Minutes(3), absl::Minutes(2));
  EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("node 1"), HasSubstr("has not closed backward")));
}

TEST_F(NodeCoordinatorOfCut, NodesThatEnterAPassWhileOthersWriteOrStepAreNamed) {
  Initialize();
  Say(0, Enters(2, 1, /*edited=*/true));
  Say(1, AsksToWrite(2));
  EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("CommitParameters: nodes differ"), HasSubstr("enter a pass, on node 0"),
                                    HasSubstr("write, on node 1")));
  Say(1, Closed(kAllBackwards));
  Say(0, Enters(2, 1, /*edited=*/false));
  EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("EnterPass: nodes differ"), HasSubstr("enter a pass, on node 0"),
                                    HasSubstr("a step, on node 1")));
  for (int node = 0; node < 2; ++node) Say(node, Enters(2, 1, /*edited=*/true));
  sent_.clear();
  Say(0, Values(10, 2));  // nobody was let write
  EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("node 0"), HasSubstr("not its turn")));
}

TEST_F(NodeCoordinatorOfCut, WhoStillWritesIsWaitedFor) {
  Initialize();
  Say(0, AsksToWrite(2));
  const absl::Time now = MonotonicNow();
  coordinator_->CheckSilence(now + absl::Minutes(3), absl::Minutes(2));
  EXPECT_THAT(EndedBecause(), HasSubstr("has not asked to write values"));
  for (int node = 0; node < 2; ++node) Say(node, AsksToWrite(2));
  Say(0, Values(10, 2));
  sent_.clear();
  EXPECT_THAT(coordinator_->Waiting(), HasSubstr("node 1"));
  for (int minutes = 3; minutes < 20; minutes += 3) {
    coordinator_->CheckSilence(now + absl::Minutes(minutes), absl::Minutes(2));
  }
  EXPECT_THAT(sent_, IsEmpty());
  Say(1, Values(11, 2));
  EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("the ranks of node 1"), HasSubstr("wrote other parts")));
}

TEST_F(NodeCoordinatorOfCut, ValuesThatNobodyWasAskedForEndTheGeneration) {
  Say(1, AsksToWrite(1));
  EXPECT_THAT(EndedBecause(), HasSubstr("not its turn"));
  Anew();
  Initialize();
  Say(1, Values(10, 2));
  EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("node 1"), HasSubstr("not its turn")));
  Say(1, AsksToWrite(3));
  EXPECT_THAT(EndedBecause(), HasSubstr("want version 2"));
  Say(1, AsksToWrite(2, 2));
  EXPECT_THAT(EndedBecause(), HasSubstr("want version 2, time 1"));
  Say(1, AsksToWrite(2));
  Say(1, Closed(kAllBackwards));
  Say(1, Abandoned("its rank is lost"));
  EXPECT_THAT(EndedBecause(), HasSubstr("its rank is lost"));
  Say(0, AsksToWrite(2));
  EXPECT_EQ(Kinds(1), "") << "what was asked is of the generation before";
}

TEST_F(NodeCoordinatorOfTwo, ReplicasAskNobodyToWrite) {
  v1::PeerMessage message;
  message.mutable_asks_to_write()->set_version(2);
  message.mutable_asks_to_write()->set_times(1);
  Say(1, message);
  EXPECT_THAT(EndedBecause(), HasSubstr("not its turn"));
}

TEST_F(NodeCoordinatorOfTwo, WhatIsOfAnotherGenerationIsNotHeard) {
  Say(1, Abandoned("once"));
  EXPECT_NE(EndedBecause(), "");
  for (uint64_t generation : {0u, 1u, 3u}) {
    for (v1::PeerMessage message : {Ready(kA), Ready(99), Closed(-1), Reduced("too long"), Abandoned("twice")}) {
      message.set_generation(generation);
      coordinator_->OnMessage(1, message);
    }
  }
  EXPECT_THAT(sent_, IsEmpty());
  EXPECT_EQ(coordinator_->Waiting(), "");
  EXPECT_TRUE(TrainsAStep());
}

TEST_F(NodeCoordinatorOfTwo, ANormThatDiffersBeyondRoundingEndsTheStep) {
  const auto reduced = [this](double sum) {
    v1::PeerMessage message = Reduced();
    message.mutable_reduced()->set_norm_scale(1);
    message.mutable_reduced()->set_norm_sum(sum);
    return message;
  };
  for (int node = 0; node < 2; ++node) Say(node, Closed(kAllBackwards));
  Say(0, reduced(2));
  Say(1, reduced(2 + 1e-12));
  EXPECT_EQ(decides_, 1);
  coordinator_->Decide(Decided());
  Say(1, Held(step_++));
  for (int node = 0; node < 2; ++node) Say(node, Closed(kAllBackwards));
  Say(0, reduced(2));
  Say(1, reduced(2.001));
  EXPECT_EQ(decides_, 1);
  EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("node 1 (host1:7000) is no replica of node 0"), HasSubstr("2.001")));
}

TEST_F(NodeCoordinatorOfTwo, StepsAreDecidedOnceAndALostNodeHearsLater) {
  for (int node = 0; node < 2; ++node) Say(node, Closed(kAllBackwards));
  for (int node = 0; node < 2; ++node) Say(node, Reduced());
  EXPECT_EQ(decides_, 1);
  coordinator_->Decide(Decided());
  sent_.clear();
  coordinator_->OnDown(1, absl::UnavailableError("reset by peer"));
  EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("node 1 (host1:7000) is lost"), HasSubstr("reset by peer")));
  coordinator_->OnDown(1, absl::UnavailableError("cannot be reached"));
  EXPECT_THAT(sent_, IsEmpty()) << "it has no link to lose";
  Up(1);
  ASSERT_EQ(Kinds(1), "begin ");
  EXPECT_EQ(LastBegin().code(), 0);
  EXPECT_EQ(LastBegin().generation(), 2u);
  EXPECT_EQ(LastBegin().decided_step(), 1);
  EXPECT_EQ(LastBegin().decided().grad_norm(), 1.5);
  EXPECT_TRUE(LastBegin().initialized());
  step_ = 2;
  EXPECT_TRUE(TrainsAStep());
}

TEST_F(NodeCoordinatorOfThree, ADecidedStepIsShownWhenEveryNodeHoldsIt) {
  for (int node = 0; node < 3; ++node) Say(node, Closed(kAllBackwards));
  for (int node = 0; node < 3; ++node) Say(node, Reduced());
  coordinator_->Decide(Decided());
  sent_.clear();
  Say(1, Held(1));
  Say(2, Held(0));
  Say(2, Held(2));  // nobody can
  EXPECT_THAT(sent_, IsEmpty());
  EXPECT_THAT(coordinator_->Waiting(), AllOf(HasSubstr("node 2 (host2:7000)"), HasSubstr("holds step 1")));
  EXPECT_FALSE(coordinator_->AllServed());
  // What a node holds goes with its link: its daemon may be lost.
  coordinator_->OnDown(1, absl::UnavailableError("gone"));
  EXPECT_EQ(coordinator_->Waiting(), "") << "the attempt has ended";
  sent_.clear();
  v1::PeerMessage late = Held(1);
  late.set_generation(1);  // of the attempt that has ended
  coordinator_->OnMessage(2, late);
  EXPECT_THAT(sent_, IsEmpty());
  EXPECT_THAT(coordinator_->Unheld(), HasSubstr("node 1 (host1:7000), which has no link,"));
  coordinator_->OnUp(1);
  v1::PeerMessage holds;
  holds.mutable_holds()->set_initialized(true);
  coordinator_->OnMessage(1, holds);
  EXPECT_EQ(LastBegin().held_step(), 0);
  EXPECT_EQ(LastBegin().decided_step(), 1);
  sent_.clear();
  Say(1, Held(1));
  for (int node = 0; node < 3; ++node) EXPECT_EQ(Kinds(node), "held ");
  EXPECT_TRUE(coordinator_->AllServed());
  coordinator_->OnDown(1, absl::UnavailableError("gone"));
  EXPECT_EQ(coordinator_->Unheld(), "") << "it may be shown, whatever comes";
  EXPECT_FALSE(coordinator_->AllServed());
  coordinator_->OnUp(1);
  coordinator_->OnMessage(1, holds);
  EXPECT_EQ(LastBegin().held_step(), 1);
}

TEST_F(NodeCoordinatorOfTwo, ANodeWithoutADecidedStepEndsTheGenerationOnce) {
  for (int node = 0; node < 2; ++node) Say(node, Closed(kAllBackwards));
  for (int node = 0; node < 2; ++node) Say(node, Reduced());
  coordinator_->Decide(Decided());
  sent_.clear();
  const absl::Time now = MonotonicNow();
  coordinator_->CheckSilence(now + absl::Minutes(3), absl::Minutes(2));
  EXPECT_THAT(EndedBecause(),
              AllOf(HasSubstr("node 1 (host1:7000)"), HasSubstr("holds step 1"), HasSubstr("limit 2m")));
  coordinator_->CheckSilence(now + absl::Minutes(9), absl::Minutes(2));
  EXPECT_THAT(sent_, IsEmpty());
  Say(1, Held(1));
  EXPECT_EQ(Kinds(0), "held ");
}

class ANodeThatLeaves : public NodeCoordinatorTest {
 protected:
  explicit ANodeThatLeaves(int nodes = 2) : NodeCoordinatorTest(nodes) {}
  // A step behind which all nodes but node 0 want the attempt to end; all hold it, and have ended their attempts.
  void TrainAndEnd() {
    Initialize();
    for (int node = 0; node < plan_->nodes(); ++node) Say(node, Closed(kAllBackwards));
    v1::PeerMessage reduced = Reduced();
    Say(0, reduced);
    reduced.mutable_reduced()->set_ends_attempt("its daemon is replaced");
    for (int node = 1; node < plan_->nodes(); ++node) Say(node, reduced);
    v1::PeerMessage::Decided decided = Decided();
    decided.set_ends_attempt("node 1: its daemon is replaced");
    coordinator_->Decide(decided);
    for (int node = 1; node < plan_->nodes(); ++node) Say(node, Held(step_));
    sent_.clear();
    for (int node = 0; node < plan_->nodes(); ++node) Say(node, Abandoned("its daemon is replaced"));
  }
};
class TwoNodesThatLeave : public ANodeThatLeaves {
 protected:
  TwoNodesThatLeave() : ANodeThatLeaves(3) {}
};

// The first is back before the second goes.
TEST_F(TwoNodesThatLeave, EndOneAttempt) {
  TrainAndEnd();
  coordinator_->OnDown(1, absl::UnavailableError("gone"));
  coordinator_->OnUp(1);
  v1::PeerMessage holds;
  holds.mutable_holds()->set_initialized(true);
  holds.mutable_holds()->set_step(step_);
  coordinator_->OnMessage(1, holds);
  EXPECT_THAT(sent_, IsEmpty());
  coordinator_->OnDown(2, absl::UnavailableError("gone"));
  EXPECT_EQ(Kinds(0), "begin ");
  EXPECT_EQ(Kinds(1), "begin ");
  EXPECT_EQ(Kinds(2), "");
  EXPECT_EQ(LastBegin().decided().ends_attempt(), "");
}

TEST_F(ANodeThatLeaves, BeginsTheNextGenerationWithItsLink) {
  TrainAndEnd();
  EXPECT_THAT(sent_, IsEmpty());
  coordinator_->OnDown(1, absl::UnavailableError("gone"));
  EXPECT_EQ(Kinds(0), "begin ");
}

TEST_F(ANodeThatLeaves, IsNotWaitedForLong) {
  TrainAndEnd();
  coordinator_->CheckSilence(MonotonicNow() + absl::Seconds(55), absl::Minutes(2));
  EXPECT_THAT(sent_, IsEmpty());
  coordinator_->CheckSilence(MonotonicNow() + absl::Seconds(65), absl::Minutes(2));
  EXPECT_EQ(Kinds(0), "begin ");
  EXPECT_EQ(Kinds(1), "begin ");
}

TEST_F(NodeCoordinatorTest, ANodeThatComesIsToldWhatThereIs) {
  coordinator_->OnDown(1, absl::UnavailableError("gone"));
  Up(1);
  EXPECT_EQ(LastBegin().decided_step(), 0);
  EXPECT_FALSE(LastBegin().has_decided());
  EXPECT_FALSE(LastBegin().initialized());
}

TEST_F(NodeCoordinatorOfTwo, ANodeThatFinishesBetweenStepsDisturbsNobody) {
  EXPECT_TRUE(TrainsAStep());
  coordinator_->OnFinished(1);
  coordinator_->OnDown(1, absl::UnavailableError("gone"));
  EXPECT_THAT(sent_, IsEmpty());
  Say(0, Ready(kA));
  EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("node 1"), HasSubstr("has finished")));
}

TEST_F(NodeCoordinatorOfTwo, ANodeThatFinishesDuringAStepEndsIt) {
  Say(0, Closed(1));
  coordinator_->OnFinished(1);
  EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("node 1"), HasSubstr("has finished"), HasSubstr("step 1")));
}

class NodeCoordinatorOfParts : public NodeCoordinatorTest {
 protected:
  NodeCoordinatorOfParts() : NodeCoordinatorTest(2) { Initialize(); }
  v1::PeerMessage ClosedPart(int left) const {
    v1::PeerMessage message = Closed(kAllBackwards);
    message.mutable_closed()->mutable_ranks_step()->add_left_groups(left);
    message.mutable_closed()->mutable_ranks_step()->set_part(true);
    return message;
  }
  v1::PeerMessage ReducedPart() const {
    v1::PeerMessage message = Reduced();
    message.mutable_reduced()->set_part(true);
    return message;
  }
  void MakePart() {
    for (int node = 0; node < 2; ++node) Say(node, ClosedPart(1));
    for (int node = 0; node < 2; ++node) Say(node, ReducedPart());
    v1::PeerMessage::Decided part = Decided();
    part.set_part(true);
    coordinator_->DecidePart(part);
  }
};

TEST_F(NodeCoordinatorOfParts, NodesCloseAndReduceEachPartAndHoldTheLast) {
  for (int node = 0; node < 2; ++node) Say(node, Ready(kA));
  sent_.clear();
  MakePart();
  EXPECT_EQ(Kinds(1), "closed all decided ");
  EXPECT_EQ(Kinds(0), "closed all ") << "nothing is held of a part";
  MakePart();
  for (int node = 0; node < 2; ++node) Say(node, Closed(kAllBackwards));
  for (int node = 0; node < 2; ++node) Say(node, Reduced());
  EXPECT_EQ(decides_, 3);
  coordinator_->Decide(Decided());
  Say(1, Held(1));
  EXPECT_EQ(Kinds(1), "closed all decided closed all decided closed all decided held ");
  ++step_;
  EXPECT_TRUE(TrainsAStep());
}

TEST_F(NodeCoordinatorOfParts, NodesThatMakeOtherPartsAreNamed) {
  Say(0, ClosedPart(1));
  Say(1, ClosedPart(0));
  EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("node 1"), HasSubstr("left_groups (got [0], want [1])")));
  Say(0, ClosedPart(1));
  v1::PeerMessage whole = ClosedPart(1);
  whole.mutable_closed()->mutable_ranks_step()->set_part(false);
  Say(1, whole);
  EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("node 1"), HasSubstr("part (got false, want true)")));
}

TEST_F(NodeCoordinatorOfParts, ANodeSaysNothingElseBetweenParts) {
  MakePart();
  sent_.clear();
  Say(1, Ready(kA));
  EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("node 1"), HasSubstr("else than the next part of step 1"),
                                    HasSubstr("1 parts of it are made")));
  EXPECT_TRUE(TrainsAStep()) << "in the next generation no part is made";
}

TEST_F(NodeCoordinatorOfParts, ANodeThatFinishesBetweenPartsEndsTheStep) {
  MakePart();
  sent_.clear();
  coordinator_->OnFinished(1);
  EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("node 1"), HasSubstr("has finished"), HasSubstr("step 1")));
}

TEST_F(NodeCoordinatorOfThree, WhomTheOthersWaitForIsNamed) {
  EXPECT_EQ(coordinator_->Waiting(), "");
  Say(0, Ready(kA));
  Say(2, Ready(kA));
  EXPECT_THAT(coordinator_->Waiting(), AllOf(HasSubstr("node 1"), HasSubstr("group \"a\"")));
  Say(1, Ready(kA));
  EXPECT_EQ(coordinator_->Waiting(), "");
  Say(0, Closed(1));
  Say(1, Closed(1));
  EXPECT_THAT(coordinator_->Waiting(), AllOf(HasSubstr("node 2"), HasSubstr("has not closed backward 0 of step 1")));
  for (int node = 0; node < 3; ++node) Say(node, Closed(kAllBackwards));
  Say(2, Reduced());
  EXPECT_THAT(coordinator_->Waiting(), HasSubstr("node 0"));
  Say(0, Reduced());
  EXPECT_THAT(coordinator_->Waiting(), AllOf(HasSubstr("node 1"), HasSubstr("sums of step 1")));
  const absl::Time now = MonotonicNow();
  sent_.clear();
  coordinator_->CheckSilence(now, absl::Minutes(2));
  EXPECT_THAT(sent_, IsEmpty());
  coordinator_->CheckSilence(now + absl::Minutes(3), absl::Minutes(2));
  EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("node 1 (host1:7000)"), HasSubstr("limit 2m")));
  coordinator_->CheckSilence(now + absl::Minutes(6), absl::Minutes(2));
  EXPECT_THAT(sent_, IsEmpty()) << "nobody waits";
  EXPECT_TRUE(TrainsAStep());
}

TEST_F(NodeCoordinatorTest, WhoHasNotGivenItsValuesIsNamed) {
  Say(0, Values());
  coordinator_->CheckSilence(MonotonicNow() + absl::Minutes(3), absl::Minutes(2));
  EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("node 1"), HasSubstr("initial values")));
}

// Each is said by node 1 in a step in which "a" has been summed in backward 0, and backward 0 is closed.
TEST_F(NodeCoordinatorOfTwo, MalformedOrUntimelyMessagesOnlyEndTheGeneration) {
  const std::string mask(1, '\0');
  const auto with = [](v1::PeerMessage message, const std::function<void(v1::PeerMessage&)>& change) {
    change(message);
    return message;
  };
  std::vector<std::pair<v1::PeerMessage, std::string>> cases;
  for (int group : {-1, 3, std::numeric_limits<int>::max(), std::numeric_limits<int>::min()}) {
    cases.emplace_back(Ready(group, 1), absl::StrCat("got ", group));
  }
  for (int backward : {-1, kAllBackwards, std::numeric_limits<int>::min()}) {
    cases.emplace_back(Ready(kA, backward), absl::StrCat(backward));
  }
  for (int occurrence : {-1, 1, 7, std::numeric_limits<int>::max()}) {
    cases.emplace_back(Ready(kA, 1, occurrence), absl::StrCat("got occurrence ", occurrence, ", want 0"));
  }
  cases.emplace_back(Ready(kB, 0), "closed");
  for (int64_t step : {int64_t{0}, int64_t{-1}, int64_t{3}, std::numeric_limits<int64_t>::max()}) {
    const std::string got = absl::StrCat("got ", step, ", want 2");
    cases.emplace_back(with(Ready(kA, 1), [&](auto& m) { m.mutable_ready()->mutable_key()->set_step(step); }), got);
    cases.emplace_back(with(Closed(2), [&](auto& m) { m.mutable_closed()->set_step(step); }), got);
    cases.emplace_back(with(Reduced(), [&](auto& m) { m.mutable_reduced()->set_step(step); }), got);
  }
  for (const std::string& bytes : {std::string(), std::string(2, '\0'), std::string(1000, '\1')}) {
    cases.emplace_back(with(Ready(kA, 1), [&](auto& m) { m.mutable_ready()->mutable_gives()->set_present(bytes); }),
                       "masks");
    cases.emplace_back(with(Ready(kA, 1), [&](auto& m) { m.mutable_ready()->mutable_gives()->set_fresh(bytes); }),
                       "masks");
  }
  for (int backwards : {0, -1, 1, std::numeric_limits<int>::min()}) {
    cases.emplace_back(Closed(backwards), absl::StrCat("got ", backwards));
  }
  cases.emplace_back(with(Closed(kAllBackwards), [](auto& m) { m.mutable_closed()->clear_ranks_step(); }), "closed");
  cases.emplace_back(with(Closed(2), [](auto& m) { m.mutable_closed()->mutable_ranks_step(); }), "closed");
  cases.emplace_back(Reduced(), "not its turn");
  cases.emplace_back(Values(), "initial values");
  cases.emplace_back(with({}, [](auto& m) { m.mutable_ready(); }), "got 0, want 2");
  for (const auto& kind : std::vector<std::function<void(v1::PeerMessage&)>>{
           [](auto&) {}, [](auto& m) { m.mutable_hello(); }, [](auto& m) { m.mutable_go(); },
           [](auto& m) { m.mutable_all_closed(); }, [](auto& m) { m.mutable_decided()->set_step(2); },
           [](auto& m) { m.mutable_values_agreed(); }, [](auto& m) { m.mutable_begin()->set_generation(99); }}) {
    cases.emplace_back(with({}, kind), "not for node 0");
  }
  EXPECT_TRUE(TrainsAStep());
  // cases are of step 2
  for (auto& [message, fact] : cases) {
    if (message.has_ready() && message.ready().key().step() == 1) message.mutable_ready()->mutable_key()->set_step(2);
    if (message.has_closed() && message.closed().step() == 1) message.mutable_closed()->set_step(2);
    if (message.has_reduced() && message.reduced().step() == 1) message.mutable_reduced()->set_step(2);
  }
  for (const auto& [message, fact] : cases) {
    SCOPED_TRACE(message.ShortDebugString());
    Anew();
    step_ = 1;
    Initialize();
    EXPECT_TRUE(TrainsAStep());
    for (int node = 0; node < 2; ++node) {
      Say(node, Ready(kA));
      Say(node, Closed(1));
    }
    sent_.clear();
    const uint64_t generation = coordinator_->generation();
    Say(1, message);
    EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("node 1 (host1:7000)"), HasSubstr(fact)));
    EXPECT_EQ(coordinator_->generation(), generation + 1);
    EXPECT_TRUE(TrainsAStep());
  }
}

TEST_F(NodeCoordinatorOfTwo, WhatIsSaidTwiceEndsTheGeneration) {
  Say(1, Ready(kA));
  Say(1, Ready(kA));
  EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("node 1"), HasSubstr("given already")));
  for (int node = 0; node < 2; ++node) Say(node, Ready(kA));
  Say(1, Ready(kA));
  EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("node 1"), HasSubstr("got occurrence 0, want 1")));
  for (int node = 0; node < 2; ++node) Say(node, Closed(kAllBackwards));
  Say(1, Reduced());
  Say(1, Reduced());
  EXPECT_THAT(EndedBecause(), AllOf(HasSubstr("node 1"), HasSubstr("not its turn")));
  EXPECT_EQ(decides_, 0);
  EXPECT_TRUE(TrainsAStep());
}

TEST_F(NodeCoordinatorOfTwo, BetweenDecidableAndDecidedNothingOfTheStepIsHeard) {
  for (int node = 0; node < 2; ++node) Say(node, Closed(kAllBackwards));
  for (int node = 0; node < 2; ++node) Say(node, Reduced());
  sent_.clear();
  Say(1, Closed(kAllBackwards));
  EXPECT_NE(EndedBecause(), "");
  EXPECT_TRUE(TrainsAStep());
}

TEST_F(NodeCoordinatorOfThree, RandomMessagesNeverSpoilTheNextGeneration) {
  std::mt19937_64 rng(17);
  const auto number = [&]() -> int { return std::vector<int>{-1, 0, 0, 0, 1, 1, 2, 3, kAllBackwards}[rng() % 9]; };
  for (int i = 0; i < 50'000; ++i) {
    const int node = static_cast<int>(rng() % 3);
    switch (rng() % 40) {
      case 0:
        coordinator_->OnDown(node, absl::UnavailableError("gone"));
        Up(node);
        continue;
      case 1:
        Say(node, Abandoned("why not"));
        continue;
      case 2:
        coordinator_->CheckSilence(MonotonicNow() + absl::Hours(1), absl::Minutes(1));
        continue;
      default:
        break;
    }
    v1::PeerMessage message;
    switch (rng() % 8) {
      case 0:
      case 1:
      case 2:
        message = Ready(number(), number(), number());
        break;
      case 3:
      case 4:
        message = Closed(number());
        break;
      case 5:
        message = Closed(kAllBackwards);
        break;
      case 6:
        message = Reduced(rng() % 9 == 0 ? "\x0d" : "\x0f");
        break;
      default:
        message = rng() % 8 == 0 ? Values() : Reduced();
    }
    const int before = decides_;
    Say(node, message);
    (void)coordinator_->Waiting();
    if (decides_ > before) {
      coordinator_->Decide(Decided());
      ++step_;
    }
    if (i % 10 == 0) {
      Say(0, Abandoned("enough"));
      ASSERT_TRUE(TrainsAStep()) << "message " << i;
    }
    sent_.clear();
  }
}

}  // namespace
}  // namespace shardd
