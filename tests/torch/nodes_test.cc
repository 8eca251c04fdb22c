// Models trained through the adaptor over several nodes, each a daemon with ranks of its own, against the same model
// trained by one process without shardd.

#include <gtest/gtest.h>
#include <signal.h>

#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "tests/testing/process.h"
#include "tests/torch/parity.h"
#include "tests/torch/ranks.h"
#include "tests/torch/worker_options.h"

namespace shardd_test {
namespace {

using nlohmann::json;
using shardd::testing::Child;

constexpr int kNodes = 2;
constexpr int kKillAt = 6;

struct NodesCase {
  const char* name;
  int nodes;
  WorkerOptions options;
};
void PrintTo(const NodesCase& item, std::ostream* stream) { *stream << item.name; }

class TorchNodesParity : public ::testing::TestWithParam<NodesCase> {};

TEST_P(TorchNodesParity, LossesAndParametersEqualTheUnshardedRun) {
  const auto& [name, nodes, options] = GetParam();
  Ranks ranks(options.ranks / nodes, nodes);
  const json reference = ranks.RunReference(options);
  ExpectParity(ranks.RunSharded(options), reference, kFloat32);
}

// clang-format off
INSTANTIATE_TEST_SUITE_P(, TorchNodesParity, ::testing::Values(
  NodesCase{"Cut", 2, {.ranks = 2, .steps = 15}},
  NodesCase{"CutTwoRanksEachClipped", 2, {.ranks = 4, .steps = 15, .clip = 0.05}},
  NodesCase{"CutOverThreeDim0Tied", 3, {.ranks = 3, .model = "tied", .layout = "dim0", .steps = 15, .accumulate = 2}},
  NodesCase{"CutShardGradOp", 2, {.ranks = 2, .strategy = "shard_grad_op", .steps = 15, .clip = 0.05}},
  NodesCase{"CutFrozenAccumulated", 2, {.ranks = 4, .model = "frozen", .steps = 15, .accumulate = 3}},
  NodesCase{"CutAbsentDim0", 2, {.ranks = 4, .model = "absent", .layout = "dim0", .steps = 15, .clip = 0.05}},
  NodesCase{"CutOtherOrderOnOtherRanks", 2, {.ranks = 4, .model = "order", .steps = 15}},
  NodesCase{"CutRecomputed", 2, {.ranks = 2, .steps = 15, .recompute = true}},
  NodesCase{"CutGradientPenalty", 2, {.ranks = 2, .steps = 15, .penalty = 0.5}},
  NodesCase{"CutGroupsOfSgd", 2, {.ranks = 2, .optimizer = "sgd", .steps = 15, .two_groups = true}},
  NodesCase{"Replicas", 2, {.ranks = 4, .strategy = "hybrid", .steps = 15, .clip = 0.05}},
  NodesCase{"ReplicasDim0TiedPooled", 2,
       {.ranks = 4, .model = "tied", .strategy = "hybrid", .layout = "dim0", .unshard_mode = "pooled", .steps = 15}},
  NodesCase{"ReplicasOnThreeOfOneRank", 3, {.ranks = 3, .model = "absent", .strategy = "hybrid", .steps = 15, .accumulate = 2}}),
  [](const auto& info) { return std::string(info.param.name); });
// clang-format on

TEST(TorchNodes, LowPrecisionTrainsAndReplicasHaveWhatIsStored) {
  const WorkerOptions options{.ranks = 4, .strategy = "hybrid", .dtype = "bf16", .steps = 15};
  Ranks ranks(options.ranks / kNodes, kNodes);
  ExpectParity(ranks.RunSharded(options), ranks.RunReference(options), kBfloat16);
}

// No node has the stored values of what others hold.
void ExpectCopiesRefused(WorkerOptions options, const std::string& why) {
  Ranks ranks(options.ranks / kNodes, kNodes);
  std::vector<Child> workers;
  for (options.rank = 0; options.rank < options.ranks; ++options.rank) {
    ranks.Place(&options);
    options.out = ranks.OutOf("refused", options.rank);
    workers.push_back(ranks.Start(options));
  }
  for (Child& worker : workers) {
    EXPECT_EQ(worker.Wait(kWorkerLimit), 0);
  }
  for (options.rank = 0; options.rank < options.ranks; ++options.rank) {
    options.out = ranks.OutOf("refused", options.rank);
    const std::string refused = ranks.Read(options).value("copy refused", "");
    EXPECT_NE(refused.find(why), std::string::npos) << refused;
  }
}

TEST(TorchNodes, CopiesOfCutParametersInAnotherDtypeAreRefused) {
  ExpectCopiesRefused({.job = "refused", .ranks = 2, .dtype = "bf16", .steps = 2},
                      "is cut over nodes and unsharded in another dtype (got BFloat16, stored as Float)");
}

TEST(TorchNodes, CopiesOfParametersGatheredInFloat8AreRefused) {
  ExpectCopiesRefused({.job = "refused", .ranks = 2, .float8_gathers = true, .steps = 2},
                      "is cut over nodes and gathered in float8");
}

class TorchNodesRank : public ::testing::TestWithParam<const char*> {};

TEST_P(TorchNodesRank, ReplacedResumesAndTheResultIsTheSame) {
  WorkerOptions options{.ranks = 4, .strategy = GetParam(), .steps = 15};
  Ranks ranks(options.ranks / kNodes, kNodes);
  const json undisturbed = ranks.RunSharded(options)[0];
  options.job = "killed";
  std::vector<Child> survivors;
  for (options.rank = 0; options.rank < options.ranks - 1; ++options.rank) {
    ranks.Place(&options);
    survivors.push_back(ranks.Start(options));
  }
  ranks.Place(&options);
  options.kill_at = kKillAt;
  EXPECT_EQ(ranks.Start(options).Wait(kWorkerLimit), 1000 + SIGKILL);
  options.kill_at = -1;
  options.replace = true;
  EXPECT_EQ(ranks.Start(options).Wait(kWorkerLimit), 0);
  const json replacement = ranks.Read(options);
  EXPECT_EQ(replacement["first_step"], kKillAt);
  EXPECT_EQ(replacement["parameters"], undisturbed["parameters"]);
  for (options.rank = 0; options.rank < options.ranks - 1; ++options.rank) {
    EXPECT_EQ(survivors[static_cast<size_t>(options.rank)].Wait(kWorkerLimit), 0) << options.rank;
    const json result = ranks.Read(options);
    EXPECT_EQ(result["reattached"], 1) << options.rank;
    EXPECT_EQ(result["parameters"], undisturbed["parameters"]) << options.rank;
  }
}

INSTANTIATE_TEST_SUITE_P(, TorchNodesRank, ::testing::Values("full_shard", "hybrid"),
                         [](const auto& info) { return std::string(info.param); });

// Without a custodian: the state of its node is the other's, which has a replica.
TEST(TorchNodes, ADaemonThatDiesIsReplacedAndTheResultIsTheSame) {
  WorkerOptions options{.ranks = 4, .strategy = "hybrid", .steps = 15};
  Ranks ranks(options.ranks / kNodes, kNodes);
  const json undisturbed = ranks.RunSharded(options)[0];
  options.job = "killed";
  std::vector<Child> workers;
  for (options.rank = 0; options.rank < options.ranks; ++options.rank) {
    ranks.Place(&options);
    options.kill_at = options.rank == options.ranks - 1 ? kKillAt : -1;
    options.victim = ranks.daemon_pid(1);
    workers.push_back(ranks.Start(options));
  }
  ranks.ReplaceDeadDaemon(1);
  for (options.rank = 0; options.rank < options.ranks; ++options.rank) {
    EXPECT_EQ(workers[static_cast<size_t>(options.rank)].Wait(kWorkerLimit), 0) << options.rank;
    const json result = ranks.Read(options);
    EXPECT_EQ(result["reattached"], 1) << options.rank;
    EXPECT_EQ(result["parameters"], undisturbed["parameters"]) << options.rank;
  }
}

// By every rank of every node; what is not served is refused by name.
TEST(TorchNodes, EditedFullParametersReachTheRanksOfAllNodes) {
  for (const char* strategy : {"full_shard", "hybrid"}) {
    Ranks ranks(2, kNodes);
    const std::vector<json> results =
        ranks.RunSharded({.mode = "edit", .ranks = 4, .model = "tied", .strategy = strategy, .optimizer = "sgd"});
    ASSERT_TRUE(results[0].contains("after")) << strategy;
    for (const auto& [fqn, before] : results[0]["before"].items()) {
      for (size_t i = 0; i < before.size(); ++i) {
        EXPECT_EQ(results[0]["after"][fqn][i], static_cast<float>(before[i].get<float>() + 1)) << fqn << " " << i;
      }
    }
    EXPECT_GT(results[0]["before"].size(), 3u);
    for (const json& result : results) {
      EXPECT_EQ(result["before"], results[0]["before"]) << strategy;
      EXPECT_EQ(result["after"], results[0]["after"]) << strategy;
      EXPECT_EQ(result["beneath the root"], result["before"].size()) << strategy;
      // Replicas are written by rank 0 of each node.
      const std::string refused = result["refused"];
      EXPECT_EQ(refused.find("rank0_only is not served where parameters are cut over nodes") != std::string::npos,
                std::string(strategy) == "full_shard")
          << refused;
    }
  }
}

}  // namespace
}  // namespace shardd_test
