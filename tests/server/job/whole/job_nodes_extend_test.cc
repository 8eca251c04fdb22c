// Jobs over two nodes whose ranks ask to train more: between the same two steps on all nodes, or on none.

#include "tests/server/job/job_nodes_fixture.h"

namespace shardd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class JobNodesExtend : public JobNodesTest {
 protected:
  explicit JobNodesExtend(v1::Strategy strategy = v1::STRATEGY_HYBRID_SHARD)
      : JobNodesTest(2, strategy, /*outlives=*/false, /*in_trainers=*/false, /*edits=*/false, /*frozen=*/true) {}

  // What the node's daemon does with it is recorded.
  Extensions::Build Builds(int node) {
    return [this, node](const std::shared_ptr<const Extension>& agreed, std::vector<Extensions::Done> asked) {
      built_[node].push_back(agreed);
      asked_[node] = std::move(asked);
    };
  }
  std::shared_ptr<const Extension> With(int node, int index) {
    v1::JobSpec asked = job(node).identity().spec;
    asked.mutable_tree()->mutable_modules(0)->mutable_parameters(index)->set_requires_grad(true);
    absl::StatusOr<Extension> extension = Extend(asked, job(node).identity().spec, *nodes_[node].plan);
    EXPECT_TRUE(extension.ok()) << extension.status();
    return std::make_shared<const Extension>(*std::move(extension));
  }
  // Its rank asks to train parameter `index`.
  void Ask(int node, int index = 1) {
    OnLoop([&] {
      job(node).AwaitExtension(
          job(node).sessions()[0].get(), With(node, index),
          [this, node](const absl::Status& status) { answers_[node].push_back(status); }, Builds(node));
    });
  }
  // Its daemon has made what trains more; `taken_` counts where it takes the job's place, `dropped_` where it does not.
  void Made(int node) {
    ASSERT_TRUE(Until([&] { return !built_[node].empty(); })) << Why(node);
    OnLoop([&] {
      const auto made = std::shared_ptr<int>(new int(0), [this, node](const int* taken) {
        ++(*taken == 0 ? dropped_ : taken_)[node];
        delete taken;
      });
      job(node).ExtensionBuilt(*built_[node].back(), [made] { ++*made; });
    });
  }
  // Both ask, and both daemons have made it.
  void MadeOnBoth() {
    for (int node = 0; node < 2; ++node) Ask(node);
    for (int node = 0; node < 2; ++node) Made(node);
  }
  bool Takes(int node) {
    return Until([&] { return taken_[node] == 1; });
  }
  int Dropped(int node) {
    int dropped = 0;
    OnLoop([&] { dropped = dropped_[node]; });
    return dropped;
  }
  void AttachAgain() {
    OnLoop([&] {
      for (auto& built : built_) built.clear();  // what came of that
    });
    for (int node = 0; node < 2; ++node) Attach(node);
  }

  std::vector<absl::Status> answers_[2];
  std::vector<std::shared_ptr<const Extension>> built_[2];
  std::vector<Extensions::Done> asked_[2];
  int taken_[2] = {};
  int dropped_[2] = {};
};

TEST_F(JobNodesExtend, TakesPlaceWhenAllNodesHaveAskedAndMadeIt) {
  Begin();
  TrainsTo(1);
  TrainsTo(2);
  Ask(0);
  OnLoop([] {});
  EXPECT_TRUE(built_[0].empty()) << "the other node has not asked";
  Ask(1);
  Made(0);
  ASSERT_TRUE(Until([&] { return !built_[1].empty(); }));
  EXPECT_EQ(taken_[0], 0) << "the other node has not made it";
  Made(1);
  EXPECT_TRUE(Takes(0) && Takes(1));
  for (int node = 0; node < 2; ++node) {
    EXPECT_EQ(built_[node].size(), 1u);
    EXPECT_EQ(built_[node][0]->what, "parameter \"f\"");
    EXPECT_EQ(job(node).committed().version(), 3u);
    EXPECT_THAT(std::string(TryAttach(node).message()), HasSubstr("goes on with more to train"));
  }
}

// Whoever has taken the place of this job on another node ends its links, and a rank may die at any time.
TEST_F(JobNodesExtend, NothingThatComesBehindTheLastWordChangesIt) {
  Begin();
  MadeOnBoth();
  ASSERT_TRUE(Takes(0) && Takes(1));
  wire_.SetUp(false);
  Lose(1);
  OnLoop([] {});
  EXPECT_EQ(Why(0), "") << "it has no links any more";
  EXPECT_THAT(std::string(TryAttach(1).message()), HasSubstr("goes on with more to train"));
}

TEST_F(JobNodesExtend, ANodeThatGoesOnAloneIsNamedOnBoth) {
  Begin();
  TrainsTo(1);
  Ask(0);
  Train(1, 3);
  ASSERT_TRUE(Gone(0) && Gone(1));
  for (int node = 0; node < 2; ++node) {
    EXPECT_THAT(Why(node), AllOf(HasSubstr("rank 0 of node 0 (host0:7000) trains parameter \"f\" from here on"),
                                 HasSubstr("rank 0 of node 1 (host1:7000) does not")));
  }
  ASSERT_EQ(answers_[0].size(), 1u);
  EXPECT_EQ(answers_[0][0].code(), absl::StatusCode::kFailedPrecondition);
  AttachAgain();
  TrainsTo(2);
}

TEST_F(JobNodesExtend, NodesThatTrainDifferentParametersAreNamed) {
  Begin();
  Ask(0, 1);
  Ask(1, 2);
  ASSERT_TRUE(Gone(0) && Gone(1));
  for (int node = 0; node < 2; ++node) {
    EXPECT_THAT(Why(node), AllOf(HasSubstr("parameter \"g\", on node 1 (host1:7000)"),
                                 HasSubstr("parameter \"f\", on node 0 (host0:7000)")));
    EXPECT_TRUE(built_[node].empty());
  }
  AttachAgain();
  TrainsTo(1);
}

TEST_F(JobNodesExtend, ARankLostWhileItIsMadeDropsItOnAllNodes) {
  Begin();
  TrainsTo(1);
  Ask(0);
  Ask(1);
  Made(0);
  ASSERT_TRUE(Until([&] { return !built_[1].empty(); }));
  Lose(1);
  ASSERT_TRUE(Gone(0));
  EXPECT_THAT(Why(0), HasSubstr("killed"));
  EXPECT_EQ(Dropped(0), 1);
  AttachAgain();
  TrainsTo(2);
  MadeOnBoth();
  EXPECT_TRUE(Takes(0) && Takes(1));
}

TEST_F(JobNodesExtend, ARankThatLeavesInsteadEndsTheWaitOfAll) {
  for (const bool finished : {false, true}) {
    SCOPED_TRACE(::testing::Message() << finished);
    if (!finished) Begin();
    Ask(0);
    OnLoop([&] {
      EXPECT_TRUE(job(0).extensions().awaits_nodes());
      job(0).Detach(0, finished);
    });
    ASSERT_EQ(answers_[0].size(), 1u);
    EXPECT_EQ(answers_[0][0].code(), absl::StatusCode::kAborted) << answers_[0][0];
    answers_[0].clear();
    ASSERT_TRUE(Gone(1)) << "node 0 has heard that no rank of its own asks any more";
    if (!finished) AttachAgain();
  }
}

TEST_F(JobNodesExtend, ALinkLostWhileItIsMadeDropsItOnAllNodes) {
  Begin();
  TrainsTo(1);
  Ask(0);
  Ask(1);
  Made(1);
  ASSERT_TRUE(Until([&] { return !built_[0].empty(); }));
  wire_.SetUp(false);
  ASSERT_TRUE(Gone(0) && Gone(1));
  EXPECT_EQ(Dropped(1), 1);
  wire_.SetUp(true);
  AttachAgain();
  TrainsTo(2);
}

TEST_F(JobNodesExtend, ANodeThatCannotMakeItIsNamedOnBoth) {
  Begin();
  Ask(0);
  Ask(1);
  Made(0);
  ASSERT_TRUE(Until([&] { return !built_[1].empty(); }));
  OnLoop([&] { job(1).Abort(absl::ResourceExhaustedError("extend job: no memory"), {}); });
  ASSERT_TRUE(Gone(0));
  EXPECT_THAT(Why(0), HasSubstr("node 1 (host1:7000): extend job: no memory"));
  EXPECT_EQ(Dropped(0), 1);
  AttachAgain();
  TrainsTo(1);
}

TEST_F(JobNodesExtend, InTheMiddleOfAStepIsRefusedByName) {
  Begin();
  Submit(0, 1);
  v1::Command command;
  command.mutable_backward_done();
  Send(0, command);
  Ask(0);
  ASSERT_EQ(answers_[0].size(), 1u);
  EXPECT_THAT(std::string(answers_[0][0].message()), HasSubstr("between steps alone"));
  EXPECT_EQ(Why(0), "") << "the rank may go on";
}

TEST_F(JobNodesExtend, ANodeOfAnOlderDaemonIsNamed) {
  wire_.IsOfOlderDaemon(1);
  Begin();
  Ask(0);
  ASSERT_TRUE(Gone(0) && Gone(1));
  EXPECT_THAT(Why(0), AllOf(HasSubstr("the daemon of node 1 (host1:7000) is of an older release"),
                            HasSubstr("say what is trained when the job is opened")));
}

// Node 1 has missed what node 0 decided, and hears of it when it meets node 0 again.
TEST_F(JobNodesExtend, ANodeThatMissedItBecomesWhatTheOthersAre) {
  Begin();
  TrainsTo(1);
  wire_.Drop([](int to, const v1::PeerMessage& message) {
    return to == 1 && message.has_may_extend() && message.may_extend().made();
  });
  MadeOnBoth();
  ASSERT_TRUE(Takes(0));
  wire_.SetUp(false);
  ASSERT_TRUE(Gone(1));
  EXPECT_EQ(Dropped(1), 1);
  Attach(1);
  Submit(1, 5);
  built_[1].clear();
  OnLoop([&] {
    job(1).Widen(With(1, 1), /*as=*/0, Builds(1));
    job(1).Widen(With(1, 1), /*as=*/0, Builds(1));
  });
  ASSERT_TRUE(Gone(1));
  EXPECT_THAT(Why(1), HasSubstr("node 0 (host0:7000) trains parameter \"f\" by now"));
  ASSERT_TRUE(Until([&] { return built_[1].size() == 1; }));
  EXPECT_THAT(std::string(TryAttach(1).message()), HasSubstr("goes on with more to train"));
  OnLoop([&] {
    EXPECT_TRUE(job(1).extensions().building());
    EXPECT_EQ(job(1).committed_facts().step, 1);
  });
}

TEST_F(JobNodesExtend, WordsOutOfTurnAreIgnored) {
  Begin();
  TrainsTo(1);
  const auto say = [&](bool made) {
    v1::PeerMessage message;
    OnLoop([&] { message.set_generation(job(1).nodes().generation()); });
    message.mutable_may_extend()->set_made(made);
    wire_.Say(0, 1, message);
    OnLoop([] {});
  };
  say(false);
  say(true);
  TrainsTo(2);
  Ask(0);
  Ask(1);
  ASSERT_TRUE(Until([&] { return !built_[1].empty(); }));
  say(false);
  say(true);
  OnLoop([&] { EXPECT_EQ(built_[1].size(), 1u); });
  Made(0);
  Made(1);
  EXPECT_TRUE(Takes(0) && Takes(1));
}

// Ranks that wait for it would be told that it has another job, and end.
TEST_F(JobNodesExtend, ANodeThatBecomesTheSameIsWaitedFor) {
  Begin();
  Train(0, 1);
  wire_.TurnAway(1, 0, absl::UnavailableError("node 1 trains f by now, as this node does soon"));
  OnLoop([] {});
  EXPECT_EQ(Why(0), "");
  Train(1, 3);
  for (int node = 0; node < 2; ++node) IsAt(node, 1);
  Train(0, 1);
  wire_.TurnAway(1, 0, absl::FailedPreconditionError("node 1 describes another job"));
  ASSERT_TRUE(Gone(0));
  EXPECT_THAT(Why(0), HasSubstr("describes another job"));
}

// Its custodian is away, or memory is short.
TEST_F(JobNodesExtend, WhatCannotBeMadeNowIsMadeLater) {
  Begin();
  TrainsTo(1);
  OnLoop([&] { job(1).Widen(With(1, 1), /*as=*/0, Builds(1)); });
  ASSERT_TRUE(Until([&] { return built_[1].size() == 1; }));
  OnLoop([&] {
    job(1).extensions().PutOffWidening(MonotonicNow(), absl::Hours(1));
    job(1).Advance();
    EXPECT_EQ(built_[1].size(), 1u) << "it is put off";
    job(1).extensions().PutOffWidening(MonotonicNow(), absl::ZeroDuration());
    job(1).Advance();
    EXPECT_EQ(built_[1].size(), 2u);
    EXPECT_FALSE(job(1).closed());
  });
  EXPECT_THAT(std::string(TryAttach(1).message()), HasSubstr("goes on with more to train"));
}

class JobCutNodesExtend : public JobNodesExtend {
 protected:
  JobCutNodesExtend() : JobNodesExtend(v1::STRATEGY_FULL_SHARD) {}
};

TEST_F(JobCutNodesExtend, TakesPlaceOnAllNodesWhereParametersAreCut) {
  Begin();
  TrainsTo(1);
  TrainsTo(2);
  MadeOnBoth();
  EXPECT_TRUE(Takes(0) && Takes(1));
}

}  // namespace
}  // namespace shardd
