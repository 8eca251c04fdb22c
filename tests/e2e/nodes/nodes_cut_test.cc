// Jobs whose parameters, gradients and optimizer state are cut over the ranks of several nodes: training is that of one
// process over all ranks' batches, each daemon has memory for its part alone, and what is lost with a daemon is named.

#include <signal.h>

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/e2e/nodes/nodes.h"
#include "tests/testing/fake_cuda.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

Args Cut(const Args& args = {}) { return Args({{"strategy", "FULL_SHARD"}}).With(args); }

class NodesCutParity : public Nodes, public ::testing::WithParamInterface<std::pair<const char*, Args>> {};

TEST_P(NodesCutParity, FiftyStepsOfAllNodesEqualTheUnshardedRun) {
  const Args args = Cut(GetParam().second);
  const int gpus = args.Int("gpus", 0);
  if (gpus > 0) {
    SHARDD_NEEDS_GPUS(gpus);
    OnGpus(gpus);
  }
  Start(args.Int("node_count", 2), args.Int("world", 2));
  std::vector<v1::Job> jobs;
  const std::vector<TrainerReport> reports = RunAll(args, {}, [&] { jobs = Jobs(); });
  // Values are read as they are unsharded.
  ExpectParity(World(args), reports, args.Text("param_dtype").empty() ? 1e-5 : 4e-3);
  for (const TrainerReport& report : reports) {
    EXPECT_EQ(report.values, reports[0].values) << "what is gathered is the same everywhere";
  }
  for (int k = 0; k < count(); ++k) {
    EXPECT_EQ(jobs[k].committed_step(), 50);
    EXPECT_EQ(jobs[k].counters().reductions(), 50u * args.Int("micro", 1) * kGroupCount);
    EXPECT_EQ(jobs[k].nodes(1 - (k > 0)).bytes_received() > 0, gpus == 0) << "on GPUs NCCL carries them";
    EXPECT_TRUE(absl::StrContains(jobs[k].collective(), gpus > 0 ? "nodes by nccl: " : "nodes: peers"))
        << jobs[k].collective();
    EXPECT_TRUE(PollUntil([&] { return node(k).Job().name().empty(); })) << "all have finished";
  }
  if (gpus > 0) ExpectSame(RunAll(args.With({{"name", "again"}})), reports);  // bit by bit
}

INSTANTIATE_TEST_SUITE_P(
    Jobs, NodesCutParity,
    ::testing::Values(std::pair{"TwoByTwo", Args{}}, std::pair{"TwoByOne", Args{{"world", "1"}}},
                      std::pair{"ThreeNodes", Args{{"node_count", "3"}, {"world", "1"}, {"optimizer", "adamw"}}},
                      std::pair{"Dim0", Args{{"layout", "DIM0"}, {"world", "3"}}},
                      std::pair{
                          "GradOpAccumulated",
                          Args{{"strategy", "SHARD_GRAD_OP"}, {"micro", "3"}, {"max_norm", "0.1"}, {"lr", "0.003"}}},
                      std::pair{"NormOfInfiniteOrder",
                                Args{{"layout", "DIM0"}, {"max_norm", "0.05"}, {"norm_type", "inf"}, {"lr", "0.003"}}},
                      std::pair{"Sgd", Args{{"optimizer", "sgd"}, {"momentum", "0.9"}, {"forward_prefetch", "1"}}},
                      std::pair{"Bf16", Args{{"param_dtype", "bf16"}, {"optimizer", "sgd"}}}),
    [](const auto& info) { return std::string(info.param.first); });

INSTANTIATE_TEST_SUITE_P(
    OnGpus, NodesCutParity,
    ::testing::Values(
        std::pair{"TwoByTwo", Args{{"gpus", "2"}}}, std::pair{"TwoByOne", Args{{"gpus", "1"}, {"world", "1"}}},
        std::pair{"ThreeNodes", Args{{"gpus", "1"}, {"node_count", "3"}, {"world", "1"}, {"optimizer", "adamw"}}},
        std::pair{"Dim0ThreeRanksOnTwoGpus", Args{{"gpus", "2"}, {"layout", "DIM0"}, {"world", "3"}}},
        std::pair{
            "GradOpAccumulated",
            Args{{"gpus", "2"}, {"strategy", "SHARD_GRAD_OP"}, {"micro", "3"}, {"max_norm", "0.1"}, {"lr", "0.003"}}},
        std::pair{"Bf16", Args{{"gpus", "2"}, {"param_dtype", "bf16"}, {"optimizer", "sgd"}}}),
    [](const auto& info) { return std::string(info.param.first); });

// By the number of each node's GPUs; 0: on CPUs.
class NodesCutTest : public Nodes, public ::testing::WithParamInterface<int> {
 protected:
  void SetUp() override {
    if (GetParam() == 0) return;
    SHARDD_NEEDS_GPUS(GetParam());
    OnGpus(GetParam());
  }
  void KillAndReplace(const std::string& moment, int on, int dies) {
    Start(2);
    const Args args = Cut({{"steps", "10"}, {"recover", "1"}, {"optimizer", "adamw"}});
    const std::vector<TrainerReport> reports = RunWithADeath(args, moment, on, dies);
    ExpectSame(reports, RunAll(args.With({{"name", "undisturbed"}})));
  }
};

INSTANTIATE_TEST_SUITE_P(Devices, NodesCutTest, ::testing::Values(0, 2),
                         [](const auto& info) { return info.param == 0 ? "OnCpus" : "OnGpus"; });

TEST_P(NodesCutTest, ARankDiesInsideForward) { KillAndReplace("unsharded@3", 1, 0); }
TEST_P(NodesCutTest, ARankDiesBetweenItsBackwardAndItsStep) { KillAndReplace("backward_done@4", 1, 1); }
TEST_P(NodesCutTest, ARankOfNode0DiesBehindItsStep) { KillAndReplace("step_sent@6", 0, 1); }
TEST_P(NodesCutTest, ARankDiesBeforeTheInitialValues) { KillAndReplace("initial@0", 1, 0); }

TEST_P(NodesCutTest, NodesThatUnshardInOtherOrdersAreRight) {
  Start(2, 1);
  const Args args = Cut({{"steps", "12"}, {"order", "head,mid,embed,root"}});
  ExpectParity(World(args), RunAll(args, {{{1, 0}, {{"order", "root,embed,mid,head"}}}}));
}

TEST_P(NodesCutTest, EachDaemonHasMemoryForItsPart) {
  constexpr int64_t kFiller = int64_t{8} << 20;
  Start(2, 1);
  std::vector<v1::Memory> memories(2);
  const Args args =
      Cut({{"steps", "3"}, {"optimizer", "adamw"}, {"filler", absl::StrCat(kFiller)}, {"layout", "DIM0"}});
  ExpectAllOk(RunAll(args, {}, [&] {
    for (int k = 0; k < 2; ++k) {
      v1::JobRef job;
      job.set_job("job");
      grpc::ClientContext context;
      EXPECT_TRUE(node(k).jobs().GetMemory(&context, job, &memories[k]).ok());
    }
  }));
  for (const v1::Memory& memory : memories) {
    for (const auto& [name, bytes] :
         {std::pair{"shards", 4 * kFiller}, {"gradients", 4 * kFiller}, {"optimizer", 8 * kFiller}}) {
      const auto found = std::find_if(memory.purposes().begin(), memory.purposes().end(),
                                      [&](const v1::Purpose& purpose) { return purpose.purpose() == name; });
      ASSERT_NE(found, memory.purposes().end()) << name;
      EXPECT_GE(found->planned_bytes(), bytes / 2) << name;
      // On GPUs in pages of 2 MiB, the first one of the slab included.
      const int64_t pages_bytes = GetParam() == 0 ? int64_t{64} << 10 : int64_t{8} << 20;
      EXPECT_LE(found->planned_bytes(), bytes / 2 + pages_bytes) << name;
      EXPECT_EQ(found->allocated_bytes(), found->planned_bytes()) << name << ": nothing else was touched";
    }
  }
}

TEST_P(NodesCutTest, GradientsThatOneNodeAloneHasCountOnAll) {
  Start(2);
  const Args args = Cut({{"steps", "12"}, {"absent", "mixed"}, {"micro", "2"}, {"fresh", "b1"}});
  ExpectParity(World(args), RunAll(args));
}

// "gain" is one element, which lies on node 0: what node 1 believes of its gradient does not count.
TEST_P(NodesCutTest, OnlyHoldersOfAGradientHaveASayInIt) {
  Start(2, 1);
  const Args args = Cut({{"steps", "12"}, {"micro", "2"}, {"layout", "DIM0"}});
  ExpectParity(World(args), RunAll(args, {{{1, 0}, {{"fresh", "gain"}}}}));
}

TEST_P(NodesCutTest, ANodeMissingBeyondItsGraceEndsTheJob) {
  Start(2, 1);
  const Args args = Cut({{"steps", "400"}, {"recover", "1"}, {"grace_ms", "1500"}});
  Child survivor = StartRank(0, 0, args.With({{"pause", "before_step@5"}}));
  Child victim = StartRank(1, 0, args.With({{"recover", "0"}}));
  node(0).AwaitPause(Of(0, args), "before_step", 0);
  ASSERT_EQ(kill(node(1).daemon_pid(), SIGKILL), 0);
  node(0).LetGo(Of(0, args), "before_step", 0);
  EXPECT_EQ(survivor.Wait(), 0);
  const std::string message = Report(0, 0, args).message;
  EXPECT_TRUE(absl::StrContains(message, "node 1 (" + addresses()[1] + ") is not reached")) << message;
  EXPECT_TRUE(absl::StrContains(message, "no other node sends what its ranks held")) << message;
  victim.Kill(SIGKILL);
  victim.Wait();
}

// A node's daemon gives others what it holds until they have finished too.
TEST_P(NodesCutTest, WhoHasFinishedServesThoseWhoGoOn) {
  Start(2, 1);
  const Args args = Cut({{"steps", "6"}});
  Child first = StartRank(0, 0, args.With({{"read_values", "0"}}));
  Child reads = StartRank(1, 0, args.With({{"pause", "reading@6"}}));
  EXPECT_EQ(first.Wait(), 0);
  node(1).AwaitPause(Of(1, args), "reading", 0);
  EXPECT_EQ(node(0).Job().name(), "job") << "its only rank has finished";
  node(1).LetGo(Of(1, args), "reading", 0);
  EXPECT_EQ(reads.Wait(), 0);
  ExpectAllOk({Report(0, 0, args), Report(1, 0, args)});
  EXPECT_FALSE(Report(1, 0, args).values[kEmbed].empty());
  for (int k = 0; k < 2; ++k) EXPECT_TRUE(PollUntil([&] { return node(k).Job().name().empty(); })) << k;
}

TEST_P(NodesCutTest, AKilledDaemonLosesItsPartAndIsNamed) {
  Start(2, 1);
  const Args args = Cut({{"steps", "400"}, {"recover", "1"}, {"timeout_ms", "20000"}});
  Child survivor = StartRank(0, 0, args.With({{"pause", "before_step@5"}}));
  Child victim = StartRank(1, 0, args.With({{"recover", "0"}}));
  node(0).AwaitPause(Of(0, args), "before_step", 0);
  ASSERT_EQ(kill(node(1).daemon_pid(), SIGKILL), 0);
  EXPECT_TRUE(PollUntil([&] { return HasLostLink(0, 1); }));
  victim.Kill(SIGKILL);
  victim.Wait();
  StartAgain(1);
  Child again = StartRank(1, 0, args.With({{"recover", "0"}}));
  node(0).LetGo(Of(0, args), "before_step", 0);
  EXPECT_EQ(survivor.Wait(), 0);
  EXPECT_EQ(again.Wait(), 0);
  EXPECT_TRUE(absl::StrContains(Report(0, 0, args).message, "the daemon of node 1")) << Report(0, 0, args).message;
  EXPECT_TRUE(absl::StrContains(Report(0, 0, args).message, "from a checkpoint")) << Report(0, 0, args).message;
}

TEST_P(NodesCutTest, FullParametersInPlaceAreRefusedByName) {
  Start(2, 1);
  const std::vector<TrainerReport> reports = RunAll(Cut({{"steps", "2"}, {"full_params_at_end", "1"}}));
  // Who is not refused hears of the other's end.
  EXPECT_TRUE(std::any_of(reports.begin(), reports.end(), [](const TrainerReport& report) {
    return absl::StrContains(report.message, "full parameters are not served where they are cut over nodes");
  })) << reports[0].message;
}

}  // namespace
}  // namespace shardd::e2e
