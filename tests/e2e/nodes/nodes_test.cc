// Jobs over several nodes: daemons of their own, linked by sockets. Training is that of one process over all ranks'
// batches; a death on one node is everybody's abort and nobody's loss; what nodes do not agree on is named.

#include "tests/e2e/nodes/nodes.h"

#include <signal.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/testing/fake_cuda.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

class NodesParity : public Nodes, public ::testing::WithParamInterface<std::pair<const char*, Args>> {};

TEST_P(NodesParity, FiftyStepsOfAllNodesEqualTheUnshardedRun) {
  const Args& args = GetParam().second;
  if (args.Int("gpus") > 0) {
    SHARDD_NEEDS_GPUS(args.Int("gpus"));
    OnGpus(args.Int("gpus"));
  }
  Start(args.Int("node_count", 2), args.Int("world", 2));
  std::vector<v1::Job> jobs;
  const std::vector<TrainerReport> reports = RunAll(args, {}, [&] { jobs = Jobs(); });
  ExpectParity(World(args), reports);
  for (const TrainerReport& report : reports) {
    EXPECT_EQ(report.values, reports[0].values) << "replicas have the same bits";
  }
  for (int k = 0; k < count(); ++k) {
    EXPECT_EQ(jobs[k].committed_step(), 50);
    EXPECT_EQ(jobs[k].counters().commits(), 50);
    EXPECT_EQ(jobs[k].counters().reductions(), 50u * args.Int("micro", 1) * kGroupCount);
    ASSERT_EQ(jobs[k].nodes_size(), count());
    EXPECT_EQ(jobs[k].nodes(k).here(), true);
    EXPECT_EQ(jobs[k].nodes(1 - (k > 0)).state(), "up");
    EXPECT_EQ(jobs[k].nodes(1 - (k > 0)).bytes_sent() > 0, args.Int("gpus") == 0);
    const char* by = args.Int("gpus") > 0 ? "nodes: nccl" : "nodes: peers";
    EXPECT_TRUE(absl::StrContains(jobs[k].collective(), by)) << jobs[k].collective();
  }
}

INSTANTIATE_TEST_SUITE_P(
    OnGpus, NodesParity,
    ::testing::Values(std::pair{"TwoByTwo", Args{{"gpus", "2"}}},
                      std::pair{"TwoRanksOnOneGpu",
                                Args{{"gpus", "1"}, {"micro", "2"}, {"max_norm", "0.1"}, {"lr", "0.003"}}},
                      std::pair{"ThreeNodesDim0", Args{{"gpus", "2"}, {"node_count", "3"}, {"layout", "DIM0"}}},
                      std::pair{"Bf16", Args{{"gpus", "2"}, {"param_dtype", "bf16"}, {"optimizer", "sgd"}}}),
    [](const auto& info) { return std::string(info.param.first); });

INSTANTIATE_TEST_SUITE_P(
    Jobs, NodesParity,
    ::testing::Values(
        std::pair{"TwoByTwo", Args{}}, std::pair{"TwoByOne", Args{{"world", "1"}}},
        std::pair{"ThreeNodes", Args{{"node_count", "3"}, {"world", "1"}}},
        std::pair{"Dim0", Args{{"layout", "DIM0"}, {"world", "3"}}},
        std::pair{"Zero2Accumulated", Args{{"strategy", "HYBRID_SHARD_ZERO2"}, {"micro", "3"}, {"max_norm", "0.1"}}},
        std::pair{"NoShardSgd", Args{{"strategy", "NO_SHARD"}, {"optimizer", "sgd"}, {"momentum", "0.9"}}},
        std::pair{"Pooled", Args{{"unshard_mode", "POOLED"}, {"forward_prefetch", "1"}}},
        std::pair{"InGroupsOfTheNode", Args{{"world", "4"}, {"group_size", "2"}}},
        std::pair{"InGroupsWithCopies", Args{{"world", "4"}, {"group_size", "2"}, {"replica_copies", "1"}}}),
    [](const auto& info) { return std::string(info.param.first); });

class NodesTest : public Nodes {
 protected:
  static ::testing::AssertionResult AllAreRefused(const std::vector<TrainerReport>& reports, const std::string& text) {
    for (const TrainerReport& report : reports) {
      if (report.code == 0 || !absl::StrContains(report.message, text)) {
        return ::testing::AssertionFailure() << report.code << " " << report.message;
      }
    }
    return ::testing::AssertionSuccess();
  }

  // Rank `dies` of node `on` does so at `moment`, is replaced, and all ends as if nothing had been.
  void KillAndReplace(const std::string& moment, int on, int dies, const Args& extra = {}) {
    Start(2);
    const Args args = Args({{"steps", "10"}, {"recover", "1"}}).With(extra);
    const std::vector<TrainerReport> reports = RunWithADeath(args, moment, on, dies);
    for (int number = 0; number < 4; ++number) {
      const int k = number / 2;
      const int rank = number % 2;
      if (k == on && rank == dies) continue;
      if (moment == "initial@0") continue;  // who attaches behind the death has nothing to be told
      const std::string note = reports[static_cast<size_t>(number)].Note("aborted");
      EXPECT_TRUE(absl::StrContains(note, absl::StrCat("rank ", dies, " is lost"))) << k << " " << rank << note;
      EXPECT_EQ(absl::StrContains(note, absl::StrCat("node ", on)), k != on) << note;
    }
    ExpectSame(reports, RunAll(args.With({{"name", "undisturbed"}})));
  }

  // A daemon of one of two nodes is killed and another takes its place, while the ranks of both nodes live on.
  // `look`: called when its ranks train again.
  void OutliveDaemon(int ended, const std::string& moment = "before_step", const Args& extra = {},
                     const std::function<void()>& look = nullptr) {
    Start(2);
    const Args args =
        Args({{"steps", "12"}, {"recover", "1"}, {"outlive_daemon", "1"}, {"optimizer", "adamw"}}).With(extra);
    const Args later = look == nullptr ? args : args.With({{"pause", "before_step@9"}});
    std::vector<Child> ranks;
    for (int k = 0; k < 2; ++k) {
      for (int rank = 0; rank < 2; ++rank) {
        ranks.push_back(StartRank(k, rank, k == ended ? later : args.With({{"pause", absl::StrCat(moment, "@5")}})));
      }
    }
    for (int rank = 0; rank < 2; ++rank) node(1 - ended).AwaitPause(Of(1 - ended, args), moment, rank);
    ReplaceDaemon(ended);
    for (int rank = 0; rank < 2; ++rank) node(1 - ended).LetGo(Of(1 - ended, args), moment, rank);
    for (int rank = 0; look != nullptr && rank < 2; ++rank)
      node(ended).AwaitPause(Of(ended, args), "before_step", rank);
    if (look != nullptr) look();
    for (int rank = 0; look != nullptr && rank < 2; ++rank) node(ended).LetGo(Of(ended, args), "before_step", rank);
    for (Child& rank : ranks) EXPECT_EQ(rank.Wait(), 0);
    ExpectNothingChanged(args);
  }

  // The daemon and the ranks of one of two nodes are gone; another daemon takes the place, other processes those of its
  // ranks.
  void EndDaemon(int ended, int signal) {
    const int other = 1 - ended;
    Start(2);
    const Args args = {{"steps", "12"}, {"recover", "1"}, {"optimizer", "adamw"}, {"param_dtype", "bf16"}};
    std::vector<Child> survivors;
    for (int rank = 0; rank < 2; ++rank)
      survivors.push_back(StartRank(other, rank, args.With({{"pause", "before_step@5"}})));
    std::vector<Child> victims;
    for (int rank = 0; rank < 2; ++rank) victims.push_back(StartRank(ended, rank, args));
    for (int rank = 0; rank < 2; ++rank) node(other).AwaitPause(Of(other, args), "before_step", rank);
    ASSERT_EQ(kill(node(ended).daemon_pid(), signal), 0);
    EXPECT_TRUE(PollUntil([&] { return HasLostLink(other, ended); }));
    for (int rank = 0; rank < 2; ++rank) node(other).LetGo(Of(other, args), "before_step", rank);
    for (Child& victim : victims) {
      victim.Kill(SIGKILL);
      victim.Wait();
    }
    StartAgain(ended);
    std::vector<Child> again;
    for (int rank = 0; rank < 2; ++rank) {
      again.push_back(StartRank(ended, rank, args.With({{"of_any_rank", "1"}, {"pause", "end@12"}})));
    }
    for (int rank = 0; rank < 2; ++rank) node(ended).AwaitPause(Of(ended, args), "end", rank);
    EXPECT_TRUE(node(ended).HasEvent("job", "state", absl::StrCat("step 5 came from node ", other)));
    EXPECT_EQ(node(ended).Job().committed_step(), 12);
    for (int rank = 0; rank < 2; ++rank) node(ended).LetGo(Of(ended, args), "end", rank);
    for (Child& child : again) EXPECT_EQ(child.Wait(), 0);
    for (Child& child : survivors) EXPECT_EQ(child.Wait(), 0);
    ExpectNothingChanged(args);
  }
};

TEST_F(NodesTest, ARankOfNode1DiesBetweenBackwardAndStep) { KillAndReplace("backward_done@4", 1, 1); }
TEST_F(NodesTest, ARankOfNode0DiesBetweenBackwardAndStep) { KillAndReplace("backward_done@4", 0, 0); }
TEST_F(NodesTest, ARankDiesBehindItsStep) { KillAndReplace("step_sent@6", 1, 0); }
TEST_F(NodesTest, ARankOfNode0DiesBehindItsStep) { KillAndReplace("step_sent@6", 0, 1); }
TEST_F(NodesTest, ARankDiesInAWriteback) { KillAndReplace("writeback@10", 1, 1, {{"writeback_at_end", "1"}}); }
TEST_F(NodesTest, ARankDiesBeforeTheInitialValues) { KillAndReplace("initial@0", 1, 0); }

TEST_F(NodesTest, ARankOnAGpuDiesWhileNcclMayAdd) {
  SHARDD_NEEDS_GPUS(2);
  OnGpus(2);
  KillAndReplace("backward_done@4", 1, 1);
}
TEST_F(NodesTest, ARankOnAGpuDiesBehindItsStep) {
  SHARDD_NEEDS_GPUS(2);
  OnGpus(2);
  KillAndReplace("step_sent@6", 0, 1);
}

TEST_F(NodesTest, DeathsOnBothNodesInTurnLoseNothing) {
  Start(2);
  const Args args = {{"steps", "12"}, {"recover", "1"}};
  Child a = StartRank(0, 0, args);
  Child b = StartRank(1, 1, args);
  Child first = StartRank(0, 1, args.With({{"kill", "backward_done@3"}}));
  Child second = StartRank(1, 0, args.With({{"kill", "step_sent@7"}}));
  EXPECT_EQ(first.Wait(), kKilled);
  Child first_again = StartRank(0, 1, args);
  EXPECT_EQ(second.Wait(), kKilled);
  Child second_again = StartRank(1, 0, args);
  for (Child* child : {&a, &b, &first_again, &second_again}) EXPECT_EQ(child->Wait(), 0);
  ExpectNothingChanged(args);
}

TEST_F(NodesTest, GradientsThatOneNodeAloneHasCountOnAll) {
  Start(2);
  const Args args = {{"steps", "12"}, {"absent", "mixed"}, {"micro", "2"}, {"fresh", "b1"}};
  ExpectParity(World(args), RunAll(args));
}

TEST_F(NodesTest, InitialValuesThatDifferAreNamed) {
  Start(2, 1);
  const Args args = {{"steps", "2"}};
  const std::vector<TrainerReport> reports = RunAll(args, {{{1, 0}, {{"odd_initial", "mid.w1"}}}});
  EXPECT_TRUE(AllAreRefused(reports, "initial value of \"mid.w1\" on node 1"));
}

TEST_F(NodesTest, ANodeWithAnotherSecretIsNamed) {
  Start(2, 1);
  node(0).RanksFind({"SHARDD_JOB_SECRET=0123456789abcdef"});
  node(1).RanksFind({"SHARDD_JOB_SECRET=0123456789abcdeF"});
  const std::vector<TrainerReport> reports = RunAll({{"steps", "2"}});
  EXPECT_TRUE(AllAreRefused(reports, "give the ranks of all nodes the same SHARDD_JOB_SECRET"));
  // With one secret they train.
  node(1).RanksFind({"SHARDD_JOB_SECRET=0123456789abcdef"});
  ExpectAllOk(RunAll({{"steps", "2"}, {"name", "alike"}}));
}

TEST_F(NodesTest, ANodeWithoutTheGpusOfOthersIsNamed) {
  OnGpus(1);
  WithoutGpus(1);
  Start(2, 1);
  const std::vector<TrainerReport> reports = RunAll({{"steps", "1"}, {"timeout_ms", "5000"}});
  EXPECT_TRUE(AllAreRefused(reports, "ranks train on GPUs on all nodes or on none"));
}
TEST_F(NodesTest, HyperparametersThatDifferAreNamed) {
  Start(2, 1);
  const std::vector<TrainerReport> reports = RunAll({{"steps", "2"}}, {{{1, 0}, {{"odd_lr", "0.5@1"}}}});
  EXPECT_TRUE(AllAreRefused(reports, "hyperparameters of node 1"));
}

TEST_F(NodesTest, AnotherJobOfTheSameNameIsNamed) {
  Start(2, 1);
  const std::vector<TrainerReport> reports = RunAll({{"steps", "2"}}, {{{1, 0}, {{"layout", "DIM0"}}}});
  for (const TrainerReport& report : reports) EXPECT_NE(report.code, 0);
  const auto names = [](const TrainerReport& report) { return absl::StrContains(report.message, "layout"); };
  EXPECT_TRUE(names(reports[0]) || names(reports[1])) << reports[0].message << "\n" << reports[1].message;
}

TEST_F(NodesTest, ANodeThatFallsSilentIsNamed) {
  Start(2, 1);
  const Args args = {{"steps", "6"}, {"silence_ms", "1500"}};
  Child waits = StartRank(0, 0, args);
  Child silent = StartRank(1, 0, args.With({{"pause", "before_step@3"}}));
  EXPECT_EQ(waits.Wait(), 0);
  EXPECT_TRUE(absl::StrContains(Report(0, 0, args).message, "node 1")) << Report(0, 0, args).message;
  EXPECT_TRUE(absl::StrContains(Report(0, 0, args).message, "step 4")) << Report(0, 0, args).message;
  node(1).LetGo(Of(1, args), "before_step", 0);
  EXPECT_EQ(silent.Wait(), 0);
}

TEST_F(NodesTest, LivingRanksReattachToANewDaemonOfTheirNode) { OutliveDaemon(1); }
TEST_F(NodesTest, LivingRanksReattachToANewDaemonOfNode0) { OutliveDaemon(0); }
TEST_F(NodesTest, ANewDaemonGetsMatricesOfMuonFromAReplica) {
  OutliveDaemon(1, "before_step", {{"muon", "1"}, {"momentum", "0"}, {"lr", "0.003"}});
}
TEST_F(NodesTest, ANewDaemonGetsStatesOfAdafactorFromAReplica) {
  OutliveDaemon(1, "before_step", {{"adafactor", "1"}, {"momentum", "0"}, {"lr", "0.003"}}, [this] {
    // What lies between the states of rows and columns is neither read nor written.
    for (int k = 0; k < 2; ++k) {
      v1::JobRef ref;
      ref.set_job("job");
      grpc::ClientContext context;
      v1::Memory memory;
      ASSERT_TRUE(node(k).jobs().GetMemory(&context, ref, &memory).ok());
      for (const v1::Purpose& purpose : memory.purposes()) {
        if (purpose.purpose() != "optimizer") continue;
        EXPECT_GT(purpose.allocated_bytes(), 0);
        EXPECT_LE(purpose.allocated_bytes(), purpose.planned_bytes()) << "node " << k;
      }
    }
  });
}
TEST_F(NodesTest, ADaemonsDeathTakesBackWhatIsWrittenOnOtherNodes) {
  OutliveDaemon(1, "writeback", {{"steps", "5"}, {"writeback_at_end", "1"}});
}
TEST_F(NodesTest, Node0sDaemonsDeathTakesBackWhatIsWrittenOnOthers) {
  OutliveDaemon(0, "writeback", {{"steps", "5"}, {"writeback_at_end", "1"}});
}
TEST_F(NodesTest, AKilledDaemonGetsTheStateFromAReplica) { EndDaemon(1, SIGKILL); }
TEST_F(NodesTest, AStoppedDaemonGetsTheStateFromAReplica) { EndDaemon(1, SIGTERM); }
TEST_F(NodesTest, Node0sKilledDaemonGetsTheStateFromAReplica) { EndDaemon(0, SIGKILL); }
TEST_F(NodesTest, Node0sStoppedDaemonGetsTheStateFromAReplica) { EndDaemon(0, SIGTERM); }
TEST_F(NodesTest, Node0sKilledGpuDaemonGetsTheStateFromAReplica) {
  SHARDD_NEEDS_GPUS(2);
  OnGpus(2);
  EndDaemon(0, SIGKILL);
}
TEST_F(NodesTest, AKilledGpuDaemonGetsTheStateFromAReplica) {
  SHARDD_NEEDS_GPUS(2);
  OnGpus(2);
  EndDaemon(1, SIGKILL);
}

TEST_F(NodesTest, AJobClosedOnOneNodeIsClosedOnAll) {
  Start(2, 1);
  const Args args = {{"steps", "400"}, {"pause", "before_step@3"}};
  Child a = StartRank(0, 0, args);
  Child b = StartRank(1, 0, args);
  for (int k = 0; k < 2; ++k) node(k).AwaitPause(Of(k, args), "before_step", 0);
  v1::JobRef ref;
  ref.set_job("job");
  grpc::ClientContext context;
  v1::CloseJobByNameResponse closed;
  ASSERT_TRUE(node(1).jobs().CloseJobByName(&context, ref, &closed).ok());
  EXPECT_TRUE(PollUntil([&] { return node(0).Job().name().empty(); }));
  for (int k = 0; k < 2; ++k) node(k).LetGo(Of(k, args), "before_step", 0);
  EXPECT_EQ(a.Wait(), 0);
  EXPECT_EQ(b.Wait(), 0);
  EXPECT_TRUE(absl::StrContains(Report(0, 0, args).message, "node 1")) << Report(0, 0, args).message;
}

TEST_F(NodesTest, ADaemonWithoutAnAddressForOthersSaysSo) {
  Node alone;
  alone.StartDaemon({}, "cpu:1");
  const Args args = {{"world", "1"}, {"strategy", "HYBRID_SHARD"}, {"nodes", "localhost:1,localhost:2"}};
  Child child = alone.StartRank(0, args);
  EXPECT_EQ(child.Wait(), 0);
  const TrainerReport report = alone.Report(args, 0);
  EXPECT_TRUE(absl::StrContains(report.message, "--peer_listen")) << report.message;
}

}  // namespace
}  // namespace shardd::e2e
