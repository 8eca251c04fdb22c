// Jobs whose shard groups span nodes: the nodes of a row have one copy between them, and rows are replicas of each
// other. Training is that of one process over all ranks' batches, bit by bit that of a copy that is cut over all nodes.

#include <algorithm>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/e2e/nodes/nodes.h"
#include "tests/testing/fake_cuda.h"
#include "tests/testing/poll.h"

namespace shardd::e2e {
namespace {

using testing::Child;
using testing::PollUntil;

// Four nodes in two rows; `ranks` of each node.
Args Rows(int ranks, const Args& args = {}) {
  return Args({{"strategy", "HYBRID_SHARD"}, {"world", absl::StrCat(ranks)}, {"group_size", absl::StrCat(2 * ranks)}})
      .With(args);
}

class NodesRowsParity : public Nodes, public ::testing::WithParamInterface<std::pair<const char*, Args>> {};

TEST_P(NodesRowsParity, TwentyStepsOfAllNodesEqualTheUnshardedRun) {
  const Args args = Rows(GetParam().second.Int("world", 1), {{"steps", "20"}, {"bits", "1"}}).With(GetParam().second);
  const int ranks = args.Int("world");
  const int gpus = args.Int("gpus");
  if (gpus > 0) {
    SHARDD_NEEDS_GPUS(gpus);
    OnGpus(gpus);
  }
  Start(args.Int("node_count", 4), ranks);
  std::vector<v1::Job> jobs;
  const std::vector<TrainerReport> reports = RunAll(args, {}, [&] { jobs = Jobs(); });
  ExpectParity(World(args), reports, args.Text("param_dtype").empty() ? 1e-5 : 4e-3);
  for (const TrainerReport& report : reports) {
    EXPECT_EQ(report.values, reports[0].values) << "what is gathered is the same in every row";
  }
  // What a rank holds has the bits of the rank at its place of another row.
  const size_t row = static_cast<size_t>(args.Int("group_size"));
  for (size_t rank = row; rank < reports.size(); ++rank) {
    EXPECT_FALSE(reports[rank].bits.empty());
    EXPECT_EQ(reports[rank].bits, reports[rank % row].bits) << rank;
  }
  for (int k = 0; k < count(); ++k) {
    EXPECT_EQ(jobs[static_cast<size_t>(k)].committed_step(), 20);
    EXPECT_EQ(jobs[static_cast<size_t>(k)].config().unshard_mode(), v1::UNSHARD_MODE_POOLED);
    EXPECT_TRUE(PollUntil([&] { return node(k).Job().name().empty(); })) << "all have finished";
  }
  // The norm's sum has fewer parts of one copy, and NCCL's sums of other pieces may be rounded otherwise.
  if (!args.Text("max_norm").empty() || gpus > 0) return;
  const Args cut = args.With({{"name", "cut"},
                              {"strategy", args.Text("strategy") == "HYBRID_SHARD" ? "FULL_SHARD" : "SHARD_GRAD_OP"},
                              {"group_size", "0"}});
  const std::vector<TrainerReport> want = RunAll(cut);
  ExpectAllOk(want);
  for (const TrainerReport& report : reports) EXPECT_EQ(report.values, want[0].values) << "the same sums";
}

INSTANTIATE_TEST_SUITE_P(
    Jobs, NodesRowsParity,
    ::testing::Values(
        std::pair{"OneRankEach", Args{{"optimizer", "adamw"}}}, std::pair{"TwoRanksEach", Args{{"world", "2"}}},
        std::pair{"Dim0", Args{{"world", "2"}, {"layout", "DIM0"}, {"optimizer", "adamw"}}},
        std::pair{"ThreeRowsDim0", Args{{"node_count", "6"}, {"layout", "DIM0"}, {"optimizer", "sgd"}}},
        std::pair{"RowsOfThree", Args{{"node_count", "6"}, {"group_size", "3"}}},
        std::pair{"Zero2Accumulated",
                  Args{{"strategy", "HYBRID_SHARD_ZERO2"}, {"micro", "3"}, {"max_norm", "0.1"}, {"lr", "0.003"}}},
        std::pair{"ClippedAccumulatedDim0",
                  Args{{"layout", "DIM0"}, {"micro", "2"}, {"max_norm", "0.1"}, {"lr", "0.003"}}},
        std::pair{"NormOfInfiniteOrder",
                  Args{{"layout", "DIM0"}, {"max_norm", "0.05"}, {"norm_type", "inf"}, {"lr", "0.003"}}},
        std::pair{"Bf16", Args{{"param_dtype", "bf16"}, {"optimizer", "sgd"}}}),
    [](const auto& info) { return std::string(info.param.first); });

INSTANTIATE_TEST_SUITE_P(OnGpus, NodesRowsParity,
                         ::testing::Values(std::pair{"TwoGpusEach",
                                                     Args{{"gpus", "2"}, {"world", "2"}, {"optimizer", "adamw"}}},
                                           std::pair{"TwoRanksOnOneGpu", Args{{"gpus", "1"},
                                                                              {"world", "2"},
                                                                              {"layout", "DIM0"},
                                                                              {"micro", "2"},
                                                                              {"max_norm", "0.1"},
                                                                              {"lr", "0.003"}}},
                                           std::pair{"RowsOfThreeBf16", Args{{"gpus", "1"},
                                                                             {"node_count", "6"},
                                                                             {"group_size", "3"},
                                                                             {"param_dtype", "bf16"},
                                                                             {"optimizer", "sgd"}}}),
                         [](const auto& info) { return std::string(info.param.first); });

class NodesRowsTest : public Nodes {
 protected:
  void KillAndReplace(const std::string& moment, int on) {
    Start(4, 1);
    const Args args = Rows(1, {{"steps", "10"}, {"recover", "1"}, {"optimizer", "adamw"}});
    const std::vector<TrainerReport> reports = RunWithADeath(args, moment, on, 0);
    ExpectSame(reports, RunAll(args.With({{"name", "undisturbed"}})));
  }
};

TEST_F(NodesRowsTest, ARankOfTheSecondRowDiesInsideForward) { KillAndReplace("unsharded@3", 3); }
TEST_F(NodesRowsTest, ARankDiesBetweenItsBackwardAndItsStep) { KillAndReplace("backward_done@4", 2); }
TEST_F(NodesRowsTest, ARankOfNode0DiesBehindItsStep) { KillAndReplace("step_sent@6", 0); }

TEST_F(NodesRowsTest, ARankOnAGpuDiesInsideForward) {
  SHARDD_NEEDS_GPUS(1);
  OnGpus(1);
  KillAndReplace("unsharded@3", 3);
}
TEST_F(NodesRowsTest, ARankOnAGpuDiesBehindItsStep) {
  SHARDD_NEEDS_GPUS(1);
  OnGpus(1);
  KillAndReplace("step_sent@6", 0);
}

TEST_F(NodesRowsTest, GradientsThatSomeNodesHaveCountOnAll) {
  Start(4, 1);
  const Args args = Rows(1, {{"steps", "12"}, {"absent", "mixed"}, {"micro", "2"}, {"fresh", "b1"}});
  ExpectParity(World(args), RunAll(args));
}

TEST_F(NodesRowsTest, DaemonsWhoseCustodiansKeptTheirStateGoOn) {
  WithCustodians();
  Start(4, 1);
  const Args args = Rows(1, kOutlivesDaemons.With({{"steps", "120"}}));
  std::vector<Child> ranks = StartRanks(args);
  ASSERT_TRUE(AllTrained(2));
  for (const int victim : {3, 0, 2, 1}) {
    const int64_t before = node(victim).Job().committed_step();
    ReplaceDaemon(victim);
    if (HasFatalFailure()) return;
    ASSERT_TRUE(AllTrained(before + 1)) << "killed the daemon of node " << victim;
  }
  EXPECT_FALSE(ranks[0].Ended()) << "the ranks were too fast";
  for (int k = 0; k < count(); ++k) EXPECT_EQ(ranks[static_cast<size_t>(k)].Wait(10 * testing::kLimit), 0) << k;
  ExpectNothingChanged(args);
  ExpectNothingLeft();
}

}  // namespace
}  // namespace shardd::e2e
