// Which of two jobs over the same nodes' GPUs has the turn, and what it may issue in it.

#include "server/collective/nodes/nccl/node_turns.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "server/collective/nodes/nccl/job_turns.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;
using State = JobTurns::State;

const std::vector<std::string> kNodes = {"one:1", "two:1"};

class NodeTurnsTest : public ::testing::Test {
 protected:
  struct Job {
    std::shared_ptr<NodeTurns::Seat> seat;
    NodeTurns::View view;
  };
  std::unique_ptr<Job> Enter(const std::string& name) {
    auto job = std::make_unique<Job>();
    auto seat = turns_->Enter(name, kNodes);
    EXPECT_TRUE(seat.ok()) << seat.status();
    job->seat = *seat;
    job->seat->Watch([at = job.get()](const NodeTurns::View& view) { at->view = view; });
    return job;
  }
  std::string Refusal(const std::string& name, const std::vector<std::string>& addresses = kNodes) {
    const absl::Status status = turns_->Enter(name, addresses).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    return std::string(status.message());
  }
  const std::shared_ptr<NodeTurns> turns_ = std::make_shared<NodeTurns>();
};

TEST_F(NodeTurnsTest, WhoIsAloneHasTheTurnAtOnce) {
  const auto a = Enter("a");
  EXPECT_TRUE(a->view.alone);
  EXPECT_FALSE(a->view.mine);
  a->seat->Want(true);
  EXPECT_TRUE(a->view.mine);
  EXPECT_FALSE(a->view.wanted);
}

TEST_F(NodeTurnsTest, AJobIsThereForTheOtherOnceItHasWantedTheTurn) {
  const auto a = Enter("a");
  const auto b = Enter("b");
  EXPECT_TRUE(a->view.alone && b->view.alone);
  b->seat->Want(true);
  EXPECT_FALSE(a->view.alone);
  EXPECT_TRUE(b->view.alone);
  b->seat->Release();
  EXPECT_FALSE(a->view.alone);
}

TEST_F(NodeTurnsTest, TheTurnGoesRoundWhileBothWantIt) {
  const auto a = Enter("a");
  const auto b = Enter("b");
  a->seat->Want(true);
  b->seat->Want(true);
  for (int i = 0; i < 4; ++i) {
    Job& now = i % 2 == 0 ? *a : *b;
    Job& next = i % 2 == 0 ? *b : *a;
    EXPECT_TRUE(now.view.mine && now.view.wanted);
    EXPECT_FALSE(next.view.mine);
    now.seat->Release();
    now.seat->Want(true);
    EXPECT_TRUE(next.view.mine);
    EXPECT_FALSE(now.view.mine);
  }
}

TEST_F(NodeTurnsTest, WhoWantsItNoMoreIsPassedOver) {
  const auto a = Enter("a");
  const auto b = Enter("b");
  a->seat->Want(true);
  b->seat->Want(true);
  b->seat->Want(false);
  a->seat->Release();
  EXPECT_FALSE(b->view.mine);
  a->seat->Want(true);
  EXPECT_TRUE(a->view.mine) << "though it has had the last one";
}

TEST_F(NodeTurnsTest, AJobThatLeavesGivesItsTurnBack) {
  const auto a = Enter("a");
  auto b = Enter("b");
  b->seat->Want(true);
  a->seat->Want(true);
  EXPECT_FALSE(a->view.mine || a->view.alone);
  b.reset();
  EXPECT_TRUE(a->view.mine && a->view.alone);
  EXPECT_EQ(a->seat->Other(), "");
  const auto c = Enter("c");
  EXPECT_EQ(a->seat->Other(), "c");
}

TEST_F(NodeTurnsTest, AThirdJobOrOneOfOtherNodesIsRefused) {
  const auto a = Enter("a");
  EXPECT_THAT(Refusal("a"), HasSubstr("for a job of this name already; close that one, or give this one another name"));
  EXPECT_THAT(Refusal("b", {"two:1", "one:1"}),
              HasSubstr("(got two:1,one:1, want one:1,two:1 as job \"a\" has them); name the nodes so"));
  const auto b = Enter("b");
  EXPECT_THAT(Refusal("c"),
              HasSubstr("open job \"c\": NCCL adds gradients over nodes for at most two jobs at a time on "
                        "a daemon's GPUs (there: \"a\" and \"b\"); close one of them"));
  a->seat->Leave();
  b->seat->Leave();
  EXPECT_TRUE(turns_->Enter("d", {"three:1", "one:1"}).ok()) << "nobody has other nodes any more";
}

// Of two nodes.
class JobTurnsTest : public ::testing::Test {
 protected:
  JobTurns::Step Go() {
    const JobTurns::Step step = job_.Next(view_, own_);
    job_.Take(step);
    if (step.tells.has_value()) own_.round = step.tells->round;
    return step;
  }
  // What each node has ready, issued and done; of sums.
  static TurnReport Sums(uint64_t round, uint64_t ready, uint64_t issued, uint64_t done) {
    return {round, {ready, 0}, {issued, 0}, {done, 0}};
  }
  // In turns, nothing under way, `sums` done.
  void InTurns(uint64_t sums) {
    job_.Begin(/*alone=*/false);
    own_ = Sums(1, 0, 0, 0);
    job_.OnReport(1, own_);
    view_ = {true, false, false};
    EXPECT_FALSE(Go().tells.has_value());
    EXPECT_TRUE(Go().releases) << "communicators are made";
    for (uint64_t k = 0; k < sums; ++k) {
      own_ = Sums(1, k + 1, k, k);
      job_.OnReport(1, own_);
      ASSERT_EQ(Go().tells->below.sums, k + 1);
      own_ = Sums(1, k + 1, k + 1, k + 1);
      job_.OnReport(1, own_);
      EXPECT_TRUE(Go().releases);
    }
  }
  JobTurns job_{2};
  NodeTurns::View view_;
  TurnReport own_;
};

TEST_F(JobTurnsTest, WhoIsAloneSaysNothing) {
  EXPECT_FALSE(job_.Begin(/*alone=*/true).limited);
  view_ = {true, true, false};
  for (uint64_t k = 0; k < 5; ++k) {
    own_ = Sums(0, k + 1, k, k);
    const JobTurns::Step step = Go();
    EXPECT_FALSE(step.tells.has_value());
    EXPECT_TRUE(step.wants && !step.releases);
  }
}

TEST_F(JobTurnsTest, AllGoAsFarAsTheFurthestBeforeTheOtherHasItsTurn) {
  job_.Begin(/*alone=*/true);
  view_ = {true, false, true};
  own_ = Sums(0, 4, 3, 2);
  JobTurns::Step step = Go();
  ASSERT_TRUE(step.tells.has_value());
  EXPECT_TRUE(step.tells->limited);
  EXPECT_EQ(step.tells->round, 1u);
  EXPECT_EQ(step.tells->below.sums, 3u);
  EXPECT_EQ(job_.state(), State::kClosing);
  EXPECT_FALSE(Go().tells.has_value()) << "the other node has not answered";
  job_.OnReport(1, Sums(1, 6, 5, 2));
  EXPECT_EQ(Go().tells->below.sums, 5u);
  EXPECT_EQ(job_.state(), State::kLimited);
  job_.OnReport(1, Sums(1, 9, 5, 5));
  own_ = Sums(1, 5, 5, 4);
  step = Go();
  EXPECT_FALSE(step.releases || step.tells.has_value()) << "this node has not done all";
  own_ = Sums(1, 9, 5, 5);
  EXPECT_TRUE(Go().releases);
}

TEST_F(JobTurnsTest, TheOtherLeavesBeforeAllHaveStopped) {
  job_.Begin(/*alone=*/false);
  own_ = Sums(1, 0, 0, 0);
  view_ = {true, true, false};
  const JobTurns::Step step = Go();
  ASSERT_TRUE(step.tells.has_value()) << "though the other node has not answered";
  EXPECT_FALSE(step.tells->limited);
  EXPECT_EQ(job_.state(), State::kFree);
}

TEST_F(JobTurnsTest, NodesThatKnowOfNoLimitsAreToldNone) {
  EXPECT_FALSE(job_.Begin(/*alone=*/false, /*obeyed=*/false).limited);
  view_ = {true, false, true};
  own_ = Sums(0, 4, 3, 2);
  EXPECT_FALSE(Go().tells.has_value());
}

TEST_F(JobTurnsTest, NobodyIsBeyondItsLimit) {
  InTurns(2);
  EXPECT_TRUE(job_.MayBe(Sums(1, 9, 2, 2)));
  EXPECT_FALSE(job_.MayBe(Sums(1, 9, 3, 2)));
  EXPECT_FALSE(job_.MayBe(Sums(2, 2, 2, 2))) << "of a limit that was not said";
  EXPECT_FALSE(job_.MayBe({1, {0, 9}, {0, 1}, {0, 0}}));
}

TEST_F(JobTurnsTest, WhatASumNeedsIsMovedBeforeTheTurnEnds) {
  job_.Begin(/*alone=*/true);
  view_ = {true, false, true};
  own_ = {0, {1, 2}, {1, 2}, {0, 2}};  // its sum waits for the other node's
  ASSERT_TRUE(Go().tells.has_value());
  job_.OnReport(1, {1, {0, 3}, {0, 2}, {0, 2}});
  Go();
  EXPECT_FALSE(Go().tells.has_value()) << "node 0 has not the third move yet";
  own_ = {1, {2, 3}, {1, 2}, {0, 2}};
  const JobTurns::Step step = Go();
  ASSERT_TRUE(step.tells.has_value()) << "the other node's ranks wait for it, and node 0's sum for them";
  EXPECT_EQ(step.tells->below, (TurnCounts{1, 3}));
  own_ = {1, {2, 3}, {1, 3}, {1, 3}};
  job_.OnReport(1, {1, {2, 4}, {1, 3}, {1, 3}});
  EXPECT_TRUE(Go().releases) << "the next sum is of another turn";
}

TEST_F(JobTurnsTest, ATurnIsForWhatAllNodesHaveReady) {
  InTurns(2);
  view_ = {false, false, true};
  own_ = Sums(1, 4, 2, 2);
  EXPECT_FALSE(Go().wants) << "the other node's rank is slow";
  job_.OnReport(1, Sums(1, 3, 2, 2));
  EXPECT_TRUE(Go().wants);
  view_.mine = true;
  EXPECT_EQ(Go().tells->below.sums, 3u);
  EXPECT_FALSE(Go().releases);
  own_ = Sums(1, 4, 3, 3);
  EXPECT_FALSE(Go().releases) << "the other node has not done it";
  job_.OnReport(1, Sums(1, 4, 3, 3));
  EXPECT_TRUE(Go().releases) << "one turn, though another sum is ready";
}

TEST_F(JobTurnsTest, NobodyElseWantsTheTurnSoItGoesOn) {
  InTurns(1);
  own_ = Sums(1, 3, 1, 1);
  job_.OnReport(1, own_);
  EXPECT_EQ(Go().tells->below.sums, 2u);
  own_ = Sums(1, 3, 2, 2);
  job_.OnReport(1, own_);
  const JobTurns::Step step = Go();
  EXPECT_EQ(step.tells->below.sums, 3u);
  EXPECT_FALSE(step.releases);
}

TEST_F(JobTurnsTest, TheOtherLeavesAndLimitsEnd) {
  InTurns(1);
  view_ = {false, true, false};
  EXPECT_TRUE(Go().wants) << "though nothing is ready";
  view_.mine = true;
  JobTurns::Step step = Go();
  ASSERT_TRUE(step.tells.has_value());
  EXPECT_FALSE(step.tells->limited);
  EXPECT_EQ(step.tells->round, 2u);
  EXPECT_EQ(job_.state(), State::kFree);
  view_ = {true, false, true};
  own_ = Sums(2, 2, 2, 1);
  EXPECT_EQ(Go().tells->round, 3u);
  job_.OnReport(1, Sums(1, 9, 9, 9));
  EXPECT_EQ(job_.state(), State::kClosing);
  EXPECT_FALSE(Go().tells.has_value()) << "that was said of an earlier limit";
}

}  // namespace
}  // namespace shardd
