// Jobs over two nodes whose ranks step by optimizers of their own: every pass is a version of all nodes or of none, and
// whatever dies, all go back to the same one.

#include <array>
#include <random>
#include <string>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "tests/server/job/stores_over_nodes.h"

namespace shardd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class JobNodesStores : public StoresOverNodes, public ::testing::WithParamInterface<v1::Strategy> {
 protected:
  JobNodesStores() : StoresOverNodes(GetParam()) {}
};

TEST_P(JobNodesStores, AStepOfTrainersIsAVersionOfAllNodes) {
  Begin();
  Pass();
  for (int64_t step = 1; step <= 5; ++step) {
    Step(step);
    for (int node = 0; node < 2; ++node) {
      IsOf(node, step);
      EXPECT_EQ(Read(node), -static_cast<float>(step));
    }
  }
}

TEST_P(JobNodesStores, NoRankEntersBeforeTheOtherNodeHasStored) {
  StoreStepTwo();
  const uint64_t before = Passes(0);
  Enter(0, 2);
  OnLoop([] {});
  EXPECT_EQ(Passes(0), before);
  EXPECT_EQ(Read(0), -1);
  EXPECT_EQ(job(0).committed().step(), 1);
  Enter(1, 2);
  ASSERT_TRUE(testing::PollUntil([&] { return Passes(0) == before + 1; }, kPatience)) << Why(0);
  ASSERT_TRUE(Until([&] { return job(1).committed().step() == 2; }));
  for (int node = 0; node < 2; ++node) IsOf(node, 2);
}

TEST_P(JobNodesStores, APassWithoutAStepCommitsWhatWasStored) {
  Begin();
  Pass();
  const uint64_t version = job(0).committed().version();
  for (int node = 0; node < 2; ++node) Leave(node);
  for (int node = 0; node < 2; ++node) Store(node, 7, 8);
  Pass();
  for (int node = 0; node < 2; ++node) {
    EXPECT_EQ(Read(node), 7);
    EXPECT_EQ(job(node).committed().version(), version + 1);
    EXPECT_EQ(job(node).committed().step(), 0);
  }
  for (int node = 0; node < 2; ++node) Store(node, 9, 9);
  LoseRank(1);
  AttachAll();
  for (int node = 0; node < 2; ++node) {
    EXPECT_EQ(Value(node), 7);
    EXPECT_EQ(*At(job(node).memory().optimizer(), node), 8);
  }
}

TEST_P(JobNodesStores, ARankThatDiesTakesAllNodesBack) {
  StoreStepTwo();
  Enter(0, 2);
  Store(1, 100, 100);
  LoseRank(1);
  EXPECT_THAT(Why(0), HasSubstr("node 1 (host1:7000): "));
  EXPECT_EQ(StreamOf(0).Aborted().committed_step(), 1);
  EXPECT_EQ(StreamOf(0).Aborted().trainer_state(), "step 1");
  GoesOnFrom(1);
}

TEST_P(JobNodesStores, ALinkLostBeforeTheDecisionTakesAllBack) {
  StoreStepTwo();
  Enter(1, 2);
  wire_.SetUp(false);
  ASSERT_TRUE(Gone(0));
  Store(0, 100, 100);
  wire_.SetUp(true);
  ASSERT_TRUE(Gone(1));
  GoesOnFrom(1);
}

// Node 1 has promised the step; whether it was decided it hears on the next link.
TEST_P(JobNodesStores, ADecisionALinkLosesComesWithTheNextOne) {
  StoreStepTwo();
  wire_.Drop([](int to, const v1::PeerMessage& message) { return message.has_decided() && to == 1; });
  for (int node = 0; node < 2; ++node) Enter(node, 2);
  ASSERT_TRUE(Until([&] { return job(0).nodes().over_nodes() && !job(0).nodes().promised() && Read(0) == -2; }));
  EXPECT_EQ(job(0).view().committed_step(), 1) << "not shown";
  wire_.SetUp(false);
  wire_.Drop(nullptr);
  ASSERT_TRUE(Gone(0));
  EXPECT_EQ(StreamOf(0).Aborted().committed_step(), 1);
  Store(0, 100, 100);
  Store(1, 100, 100);  // by a rank that waits for nothing
  EXPECT_THAT(std::string(TryAttach(0).message()), HasSubstr("attach again"));
  wire_.SetUp(true);
  ASSERT_TRUE(Until([&] { return job(1).committed().step() == 2; }));
  ASSERT_TRUE(Until([&] { return job(0).view().committed_step() == 2; }));
  LoseRank(1);
  GoesOnFrom(2);
}

TEST_P(JobNodesStores, APromiseOutlivesTheRankThatStored) {
  StoreStepTwo();
  wire_.Drop([](int to, const v1::PeerMessage& message) { return message.has_decided() && to == 1; });
  for (int node = 0; node < 2; ++node) Enter(node, 2);
  ASSERT_TRUE(Until([&] { return !job(0).nodes().promised() && Read(0) == -2; }));
  wire_.SetUp(false);  // a link that lives on loses nothing
  wire_.Drop(nullptr);
  Lose(1);
  Store(1, 100, 100);
  wire_.SetUp(true);
  ASSERT_TRUE(Until([&] { return job(1).committed().step() == 2 && job(0).view().committed_step() == 2; }));
  ASSERT_TRUE(Gone(0) && Gone(1));
  GoesOnFrom(2);
}

TEST_P(JobNodesStores, AnAgreedPassComesWithTheNextLink) {
  Begin();
  Pass();
  for (int node = 0; node < 2; ++node) Leave(node);
  for (int node = 0; node < 2; ++node) Store(node, 7, 8);
  const uint64_t version = job(0).committed().version();
  wire_.Drop([](int to, const v1::PeerMessage& message) { return message.has_values_agreed() && to == 1; });
  for (int node = 0; node < 2; ++node) Enter(node);
  ASSERT_TRUE(Until([&] { return job(0).committed().version() == version + 1; }));
  wire_.SetUp(false);
  wire_.Drop(nullptr);
  wire_.SetUp(true);
  ASSERT_TRUE(Until([&] { return job(1).committed().version() == version + 1; }));
  for (int node = 0; node < 2; ++node) ASSERT_TRUE(Gone(node));
  AttachAll();
  for (int node = 0; node < 2; ++node) EXPECT_EQ(Value(node), 7);
}

// By commands, as full parameters are written back.
TEST_P(JobNodesStores, WrittenValuesAreWhatAllGoBackTo) {
  Begin();
  Pass();
  Step(1);
  const uint64_t version = job(0).committed().version();
  for (int node = 0; node < 2; ++node) {
    Leave(node);
    v1::Command command;
    command.mutable_enter_full_params()->set_writeback(true);
    Send(node, command);
  }
  const auto inside = [&](int node) {
    return job(node).view().IsMidStep() && StreamOf(node).FullParams().number() == 1;
  };
  for (int node = 0; node < 2; ++node) ASSERT_TRUE(Until([&] { return inside(node); })) << Why(node);
  for (int node = 0; node < 2; ++node) WriteWhole(node, 7);
  for (int node = 0; node < 2; ++node) CommitParameters(node);
  for (int node = 0; node < 2; ++node) {
    ASSERT_TRUE(Until([&] { return job(node).committed().version() == version + 1; })) << Why(node);
    v1::Command command;
    command.mutable_leave_full_params();
    Send(node, command);
  }
  for (int node = 0; node < 2; ++node) Store(node, 100, 100);
  LoseRank(1);
  AttachAll();
  for (int node = 0; node < 2; ++node) {
    EXPECT_EQ(Value(node), static_cast<float>(7 + first(node)));
    EXPECT_EQ(*At(job(node).memory().optimizer(), node), 2) << "the state is of step 1";
    EXPECT_EQ(job(node).committed().version(), version + 1);
    EXPECT_EQ(job(node).committed().trainer_states()[0], "step 1");
  }
  Pass();
  for (int node = 0; node < 2; ++node) EXPECT_EQ(Read(node), static_cast<float>(7 + first(node)));
}

TEST_P(JobNodesStores, NodesThatDifferInWhetherTheySteppedAreNamed) {
  StoreStepTwo();
  Enter(0, 2);
  Enter(1);
  ASSERT_TRUE(Gone(0) && Gone(1));
  EXPECT_THAT(Why(0), HasSubstr("nodes differ in what their ranks commit"));
  EXPECT_THAT(Why(0), HasSubstr("a step, and enter the pass behind it, on node 0 (host0:7000)"));
  GoesOnFrom(1);
}

TEST_P(JobNodesStores, TheLastStepIsThereWhereANodeFinishes) {
  Begin();
  Pass();
  Step(1);
  for (int node = 0; node < 2; ++node) Leave(node);
  for (int node = 0; node < 2; ++node) {
    OnLoop([&] { job(node).Detach(0, /*finished=*/true); });
  }
  for (int node = 0; node < 2; ++node) {
    EXPECT_TRUE(Until([&] { return job(node).nodes().finished(); })) << node;
    IsOf(node, 1);
  }
}

INSTANTIATE_TEST_SUITE_P(Placements, JobNodesStores,
                         ::testing::Values(v1::STRATEGY_HYBRID_SHARD, v1::STRATEGY_FULL_SHARD),
                         [](const auto& info) { return info.param == v1::STRATEGY_FULL_SHARD ? "Cut" : "Replicas"; });

// No daemon says that.
TEST_P(JobNodesStores, APassOutOfTurnIsNamed) {
  Begin();
  Pass();
  v1::PeerMessage message;
  OnLoop([&] { message.set_generation(job(0).nodes().generation()); });
  message.mutable_values()->set_of_pass(true);
  message.mutable_values()->set_version(99);
  wire_.Say(1, 0, message);
  ASSERT_TRUE(Gone(0));
  EXPECT_THAT(Why(0), HasSubstr("node 1 (host1:7000), a pass without a step: not its turn"));
}

class JobNodesReplicaStores : public JobNodesStores {};

TEST_P(JobNodesReplicaStores, AReplicaThatStoresOtherValuesIsNamed) {
  StoreStepTwo();
  At(job(1).memory().optimizer(), 1)[7] += 1;
  Pass(2);  // behind which nodes compare
  for (int node = 0; node < 2; ++node) Backward(node);
  for (int node = 0; node < 2; ++node) StoreStep(node, 3);
  for (int node = 0; node < 2; ++node) Enter(node, 3);
  ASSERT_TRUE(Gone(0) && Gone(1));
  EXPECT_THAT(Why(0), AllOf(HasSubstr("Step 3: node 1 (host1:7000) is no replica of node 0"),
                            HasSubstr("give all nodes the same values, seeds and hyperparameters")));
  EXPECT_THAT(Why(0), HasSubstr("\"w\" of group"));
}

TEST_P(JobNodesReplicaStores, ALostDaemonIsSentWhatWasCommitted) {
  for (int lost = 0; lost < 2; ++lost) {
    SCOPED_TRACE(lost);
    if (lost == 0) StoreStepTwo();
    const int64_t step = job(0).committed().step();
    if (lost == 0) Enter(1, 2);
    Kill(lost);
    Store(1 - lost, 100, 100);
    OpenAgain(lost);
    ASSERT_TRUE(Gone(1 - lost));
    ASSERT_TRUE(Until([&] { return job(lost).committed().version() > 0; }));
    GoesOnFrom(step);
  }
}

// What it had stored is still being copied when the state comes that it lacks.
TEST_P(JobNodesReplicaStores, AStateComesBehindCopiesOfAnEndedAttempt) {
  StoreStepTwo();
  wire_.Drop([](int to, const v1::PeerMessage& message) { return message.has_decided() && to == 1; });
  for (int node = 0; node < 2; ++node) Enter(node, 2);
  ASSERT_TRUE(Until([&] { return !job(0).nodes().promised() && Read(0) == -2; }));
  wire_.SetUp(false);
  wire_.Drop(nullptr);
  OnLoop([&] { job(1).CheckSilence(MonotonicNow() + absl::Hours(1)); });
  ASSERT_TRUE(Gone(1));
  Attach(1);
  absl::Notification go_on;
  nodes_[1].device->Submit(StreamId::kOptimizer,
                           {"held", {}, [&](const absl::Status&) { go_on.WaitForNotification(); }});
  Store(1, 100, 100);
  Enter(1);
  wire_.SetUp(true);
  EXPECT_TRUE(Until([&] { return job(1).committed().version() == 0; })) << "it is sent the state";
  absl::SleepFor(absl::Milliseconds(50));  // which is small
  go_on.Notify();
  ASSERT_TRUE(Until([&] { return job(1).committed().version() > 0; }));
  GoesOnFrom(2);
}

TEST_P(JobNodesReplicaStores, WritingWhereOthersEnterAPassIsNamed) {
  Begin();
  Pass();
  for (int node = 0; node < 2; ++node) Leave(node);
  Enter(0);
  ASSERT_TRUE(Until([&] { return job(0).nodes().promised(); }));
  v1::Command command;
  command.mutable_enter_full_params()->set_writeback(true);
  Send(1, command);
  ASSERT_TRUE(Until([&] { return job(1).view().IsMidStep() && StreamOf(1).FullParams().number() == 1; })) << Why(1);
  WriteWhole(1, 7);
  CommitParameters(1);
  ASSERT_TRUE(Gone(0) && Gone(1));
  EXPECT_THAT(Why(0), AllOf(HasSubstr("CommitParameters: nodes differ in what their ranks commit (got values, which"),
                            HasSubstr("no step, and enter a pass, on node 0")));
}

INSTANTIATE_TEST_SUITE_P(Placements, JobNodesReplicaStores, ::testing::Values(v1::STRATEGY_HYBRID_SHARD),
                         [](const auto&) { return "Replicas"; });

class JobNodesStoresSchedules : public StoresOverNodes,
                                public ::testing::WithParamInterface<std::tuple<v1::Strategy, int>> {
 protected:
  JobNodesStoresSchedules() : StoresOverNodes(std::get<0>(GetParam())) {}
};

TEST_P(JobNodesStoresSchedules, RanksAndLinksThatComeAndGoLoseNothing) {
  constexpr int64_t kSteps = 60;
  const int seed = std::get<1>(GetParam());
  std::mt19937_64 rng(static_cast<uint64_t>(seed));
  std::array<Life, 2> lives;
  bool up = true;
  const absl::Time until = MonotonicNow() + absl::Seconds(60);
  const auto behind = [&](int node) {
    bool result = false;
    OnLoop([&] { result = job(node).view().committed_step() < kSteps; });
    return result;
  };
  while ((behind(0) || behind(1)) && MonotonicNow() < until && !HasFailure()) {
    const auto node = static_cast<int>(rng() % 2);
    const uint64_t what = rng() % static_cast<uint64_t>(16 * (1 + seed));
    Disturb(node, what, &up);
    OnLoop([&] { ASSERT_FALSE(job(node).closed()); });
    Live(node, &lives[static_cast<size_t>(node)], kSteps, &rng);
  }
  for (int node = 0; node < 2; ++node) {
    EXPECT_TRUE(Until([&] { return job(node).view().committed_step() == kSteps; })) << "node " << node << Why(node);
    EXPECT_GT(job(node).committed().epoch(), 3u) << "nothing happened";
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, JobNodesStoresSchedules,
                         ::testing::Combine(::testing::Values(v1::STRATEGY_HYBRID_SHARD, v1::STRATEGY_FULL_SHARD),
                                            ::testing::Range(0, 4)));

}  // namespace
}  // namespace shardd
