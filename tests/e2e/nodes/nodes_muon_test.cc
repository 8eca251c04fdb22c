// Muon and Adafactor of the daemon's over nodes: what they update whole has the bits of a run on one node, and a rank
// that dies loses nothing of it. Daemons that die are in nodes_death_test.cc.

#include "absl/strings/str_cat.h"
#include "tests/e2e/nodes/nodes.h"
#include "tests/e2e/ranks/precision.h"
#include "tests/testing/fake_cuda.h"

namespace shardd::e2e {
namespace {

using testing::Child;

struct WholeCase {
  const char* name;
  Args args;
};

class NodesWhole : public Nodes, public ::testing::WithParamInterface<WholeCase> {
 protected:
  static Args Training(int steps) {
    const Args& args = GetParam().args;
    return Args({{"muon", args.Int("adafactor") != 0 ? "0" : "1"},
                 {"momentum", "0"},
                 {"lr", "0.003"},
                 {"steps", absl::StrCat(steps)}})
        .With(args);
  }
  // The same on one node, which has as many ranks.
  static std::vector<TrainerReport> RunOnOneNode(const Args& args, int ranks) {
    Node alone;
    alone.StartDaemon({}, absl::StrCat("cpu:", ranks));
    const Args world = Args({{"strategy", "HYBRID_SHARD"}}).With(args).With({{"world", absl::StrCat(ranks)}});
    std::vector<Child> children;
    for (int rank = 0; rank < ranks; ++rank) children.push_back(alone.StartRank(rank, world));
    std::vector<TrainerReport> reports;
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(children[static_cast<size_t>(rank)].Wait(), 0);
      reports.push_back(alone.Report(world, rank));
    }
    ExpectAllOk(reports);
    return reports;
  }
};

// Two summands, so that their order is the same.
TEST_P(NodesWhole, TwoNodesHaveTheBitsOfOne) {
  Start(2, 1);
  const Args args = Training(20);
  const std::vector<TrainerReport> got = RunAll(args), want = RunOnOneNode(args, 2);
  ExpectAllOk(got);
  for (size_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(got[rank].losses, want[rank].losses) << "rank " << rank;
    for (int p = 0; p < kParamCount; ++p) {
      Tensor values = want[rank].values[p];
      // Cut models are read as they are unsharded.
      const bool cut = args.Text("strategy", "HYBRID_SHARD") != "HYBRID_SHARD";
      for (float& x : values) x = cut ? RoundTo(args.Text("param_dtype"), x) : x;
      EXPECT_EQ(got[rank].values[p], values) << kParamNames[p] << " on rank " << rank;
      EXPECT_FALSE(values.empty());
    }
  }
}

TEST_P(NodesWhole, RanksThatDieLoseNothing) {
  Start(2);
  for (const auto& [moment, on, dies] : {std::tuple{"backward_done@4", 1, 1}, {"step_sent@6", 0, 1}}) {
    const Args args =
        Training(10).With({{"recover", "1"}, {"max_norm", "0.1"}, {"bits", "1"}, {"name", absl::StrCat("of", on)}});
    const std::vector<TrainerReport> reports = RunWithADeath(args, moment, on, dies);
    ExpectSame(reports, RunAll(args.With({{"name", absl::StrCat("undisturbed", on)}})));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Jobs, NodesWhole,
    ::testing::Values(WholeCase{"Replicas", {}}, WholeCase{"ReplicasInParts", {{"parts", "1"}, {"layout", "DIM0"}}},
                      WholeCase{"Cut", {{"strategy", "FULL_SHARD"}}},
                      WholeCase{"CutDim0InParts", {{"strategy", "FULL_SHARD"}, {"parts", "1"}, {"layout", "DIM0"}}},
                      WholeCase{"CutBf16Accumulated",
                                {{"strategy", "SHARD_GRAD_OP"}, {"param_dtype", "bf16"}, {"micro", "2"}}},
                      WholeCase{"AdafactorsReplicas", {{"adafactor", "1"}}},
                      WholeCase{"AdafactorsReplicasInParts", {{"adafactor", "1"}, {"parts", "1"}, {"layout", "DIM0"}}},
                      WholeCase{"AdafactorsCut", {{"adafactor", "1"}, {"strategy", "FULL_SHARD"}}},
                      WholeCase{"AdafactorsCutDim0Bf16",
                                {{"adafactor", "1"},
                                 {"strategy", "SHARD_GRAD_OP"},
                                 {"layout", "DIM0"},
                                 {"param_dtype", "bf16"},
                                 {"micro", "2"}}}),
    [](const auto& info) { return std::string(info.param.name); });

class NodesWholeOnGpus : public Nodes {};

TEST_F(NodesWholeOnGpus, AreRefusedByName) {
  SHARDD_NEEDS_GPUS(1);
  OnGpus(1);
  Start(2, 1);
  for (const char* const strategy : {"HYBRID_SHARD", "FULL_SHARD"}) {
    for (const auto& [arg, name] : {std::pair{"muon", "Muon"}, {"adafactor", "Adafactor"}}) {
      const Args args = {{arg, "1"},
                         {"momentum", "0"},
                         {"steps", "2"},
                         {"strategy", strategy},
                         {"name", absl::StrCat(strategy, name)}};
      for (const TrainerReport& report : RunAll(args)) {
        EXPECT_NE(report.message.find(absl::StrCat(name, " is not served where ranks train on GPUs")),
                  std::string::npos)
            << report.message;
      }
    }
  }
}

}  // namespace
}  // namespace shardd::e2e
