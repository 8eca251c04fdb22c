// Models trained through the adaptor by real processes, against the same model trained by one process without shardd.

#include "tests/torch/parity.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include "client/cpp/shardd.h"
#include "tests/torch/ranks.h"
#include "tests/torch/worker_options.h"

namespace shardd_test {
namespace {

using nlohmann::json;

struct Case {
  const char* name;
  WorkerOptions options;
};
void PrintTo(const Case& item, std::ostream* stream) { *stream << item.name; }

class TorchParity : public ::testing::TestWithParam<Case> {};

TEST_P(TorchParity, LossesAndParametersEqualTheUnshardedRun) {
  const WorkerOptions& options = GetParam().options;
  Ranks ranks(options.ranks);
  const json reference = ranks.RunReference(options);
  ExpectParity(ranks.RunSharded(options), reference, options.dtype == "fp32" ? kFloat32 : kBfloat16);
}

// clang-format off
INSTANTIATE_TEST_SUITE_P(, TorchParity, ::testing::Values(
  Case{"OneRank", {.ranks = 1}},
  Case{"TwoRanks", {.ranks = 2}},
  Case{"ThreeRanksDim0", {.ranks = 3, .layout = "dim0"}},
  Case{"FourRanksUnevenRows", {.ranks = 4, .layout = "dim0", .clip = 0.05}},
  Case{"ThreeRanksClipped", {.ranks = 3, .clip = 0.05}},
  Case{"ShardGradOp", {.ranks = 2, .strategy = "shard_grad_op", .accumulate = 2}},
  Case{"NoShard", {.ranks = 2, .strategy = "no_shard", .clip = 0.05}},
  Case{"NoShardDim0Tied", {.ranks = 3, .model = "tied", .strategy = "no_shard", .layout = "dim0"}},
  // What FULL_SHARD does not do differently with more ranks: few steps are enough.
  Case{"ShardGradOpOneRank", {.ranks = 1, .strategy = "shard_grad_op", .steps = 15, .accumulate = 2}},
  Case{"ShardGradOpFourRanks",
       {.ranks = 4, .model = "absent", .strategy = "shard_grad_op", .layout = "dim0", .steps = 15, .clip = 0.05}},
  Case{"NoShardOneRank", {.ranks = 1, .model = "tied", .strategy = "no_shard", .steps = 15, .clip = 0.05}},
  Case{"NoShardFourRanks",
       {.ranks = 4, .model = "absent", .strategy = "no_shard", .steps = 15, .accumulate = 2, .clip = 0.05}},
  Case{"Tied", {.ranks = 2, .model = "tied"}},
  Case{"TiedShardGradOpDim0", {.ranks = 3, .model = "tied", .strategy = "shard_grad_op", .layout = "dim0"}},
  Case{"Frozen", {.ranks = 2, .model = "frozen", .clip = 0.05}},
  Case{"FrozenDim0Pooled", {.ranks = 3, .model = "frozen", .layout = "dim0", .unshard_mode = "pooled"}},
  Case{"Absent", {.ranks = 2, .model = "absent"}},
  Case{"AbsentAccumulated", {.ranks = 3, .model = "absent", .accumulate = 3, .clip = 0.05}},
  Case{"Towers", {.ranks = 2, .model = "towers", .prefetch = "post"}},
  Case{"OtherOrderOnOtherRanks", {.ranks = 3, .model = "order"}},
  Case{"Accumulated", {.ranks = 2, .accumulate = 3, .clip = 0.05}},
  Case{"OverlappingMicroBatches", {.ranks = 2, .accumulate = 2, .overlap = true}},
  Case{"Recomputed", {.ranks = 2, .steps = 25, .recompute = true, .clip = 0.05}},
  Case{"RecomputedShardGradOpTied",
       {.ranks = 3, .model = "tied", .strategy = "shard_grad_op", .steps = 15, .accumulate = 2, .recompute = true}},
  Case{"RecomputedInAnotherOrder", {.ranks = 3, .model = "order", .layout = "dim0", .steps = 15, .recompute = true}},
  Case{"RecomputedPooledAllForwardsFirst",
       {.ranks = 2, .unshard_mode = "pooled", .steps = 15, .accumulate = 2, .recompute = true, .overlap = true}},
  Case{"GradientPenalty", {.ranks = 2, .steps = 25, .penalty = 0.5, .clip = 0.05}},
  Case{"GradientPenaltyShardGradOp",
       {.ranks = 2, .strategy = "shard_grad_op", .steps = 15, .accumulate = 2, .penalty = 0.5}},
  Case{"GradientPenaltyTiedDim0", {.ranks = 3, .model = "tied", .layout = "dim0", .steps = 15, .penalty = 0.5}},
  Case{"GradientPenaltyAllForwardsFirst",
       {.ranks = 2, .steps = 15, .accumulate = 2, .penalty = 0.5, .overlap = true}},
  Case{"Pooled", {.ranks = 2, .unshard_mode = "pooled"}},
  Case{"PooledTiedWithoutPrefetch", {.ranks = 2, .model = "tied", .unshard_mode = "pooled", .prefetch = "none"}},
  Case{"ClippedByTheLargestTied", {.ranks = 3, .model = "tied", .steps = 15, .clip = 0.01, .norm = "inf"}},
  Case{"ClippedByTheSumOfMagnitudesFrozen", {.ranks = 2, .model = "frozen", .steps = 15, .clip = 0.5, .norm = "1"}},
  Case{"ClippedByCubesUnevenRows", {.ranks = 4, .layout = "dim0", .steps = 15, .clip = 0.03, .norm = "3"}},
  Case{"ClippedInBetweenNoShard", {.ranks = 2, .strategy = "no_shard", .steps = 15, .clip = 0.1, .norm = "1.5"}},
  Case{"Adam", {.ranks = 2, .optimizer = "adam", .steps = 25, .clip = 0.05}},
  Case{"AdamGroupsDim0", {.ranks = 3, .layout = "dim0", .optimizer = "adam", .steps = 25, .two_groups = true}},
  Case{"BackwardGivenUpAndDoneAgain", {.ranks = 2, .steps = 10, .accumulate = 2, .fail_at = 4}},
  Case{"SgdNesterov", {.ranks = 3, .optimizer = "sgd", .clip = 1.0}},
  Case{"OptimizerGroups", {.ranks = 2, .two_groups = true}},
  Case{"SgdGroupsNoShard", {.ranks = 2, .strategy = "no_shard", .optimizer = "sgd", .two_groups = true}},
  Case{"Bfloat16", {.ranks = 2, .dtype = "bf16"}},
  Case{"Bfloat16PooledDim0", {.ranks = 3, .layout = "dim0", .unshard_mode = "pooled", .dtype = "bf16"}}),
  [](const auto& info) { return std::string(info.param.name); });
// clang-format on

TEST(TorchAdaptor, GivesTheSameResultOnEveryRun) {
  Ranks ranks(3);
  const WorkerOptions options{.ranks = 3, .model = "absent", .accumulate = 2, .clip = 0.05};
  const std::vector<json> first = ranks.RunSharded(options);
  const std::vector<json> second = ranks.RunSharded(options);
  for (size_t rank = 0; rank < first.size(); ++rank) {
    EXPECT_EQ(first[rank]["losses"], second[rank]["losses"]);
    EXPECT_EQ(first[rank]["parameters"], second[rank]["parameters"]);
  }
}

// The daemon holds the ranks' requests against each other, and in strict mode no departure goes through.
TEST(TorchAdaptor, ModulesNamedSinglyOrByClassRunInOneOrder) {
  for (const char* model : {"plain", "tied", "towers"}) {
    WorkerOptions options{.ranks = 2, .model = model, .steps = 5, .strict_order = true, .by_name = 1};
    Ranks ranks(2);
    const std::vector<json> results = ranks.RunSharded(options);
    ExpectParity(results, ranks.RunReference(options), kFloat32);
    for (const json& result : results) {
      EXPECT_EQ(result["reattached"], 0) << model;
    }
  }
}

TEST(TorchAdaptor, FullParametersComeUnderEveryNameOfATiedOne) {
  Ranks ranks(2);
  const std::vector<json> results = ranks.RunSharded({.ranks = 2, .model = "tied", .steps = 2});
  for (const json& result : results) {
    ASSERT_TRUE(result.contains("parameters"));
    const json& parameters = result["parameters"];
    // Within a module and across groups.
    for (const char* alias : {"cell0.gate.weight", "cell2.a.weight", "cell2.gate.weight"}) {
      ASSERT_TRUE(parameters.contains(alias)) << alias;
      EXPECT_EQ(parameters[alias], parameters["cell0.a.weight"]) << alias;
    }
    EXPECT_NE(parameters["cell1.a.weight"], parameters["cell0.a.weight"]);
    EXPECT_EQ(result["managed"].size(), parameters.size()) << "a name came twice";
  }
}

TEST(TorchAdaptor, AReplacedRankResumesAndTheResultIsTheSame) {
  constexpr int kKillAt = 20;
  Ranks ranks(2);
  WorkerOptions options{.ranks = 2, .model = "tied"};
  const json reference = ranks.RunReference(options);
  options.job = "killed";
  ranks.Place(&options);
  shardd::testing::Child survivor = ranks.Start(options);
  options.rank = 1;
  options.kill_at = kKillAt;
  EXPECT_EQ(ranks.Start(options).Wait(kWorkerLimit), 1000 + SIGKILL);
  options.kill_at = -1;
  options.replace = true;
  EXPECT_EQ(ranks.Start(options).Wait(kWorkerLimit), 0);
  EXPECT_EQ(survivor.Wait(kWorkerLimit), 0);
  json replacement = ranks.Read(options);
  options.rank = 0;
  const json result = ranks.Read(options);
  EXPECT_EQ(replacement["first_step"], kKillAt);
  EXPECT_EQ(result["reattached"], 1);
  ExpectParity({result}, reference, kFloat32);
  EXPECT_EQ(replacement["parameters"], result["parameters"]);
}

// Left out of the plan, and trained by the trainer with what Backward leaves in .grad.
TEST(TorchAdaptor, WhatIsLeftOutIsTheTrainersToTrain) {
  for (const char* mark : {"ignored", "replicate", "already_sharded"}) {
    Ranks ranks(2);
    // A fully sharded module's class, a plain module and single parameters of managed modules.
    const WorkerOptions options{
        .ranks = 2,
        .steps = 20,
        .left_out = {{"cell1", mark}, {"out", mark}, {"cell0.a.bias", mark}, {"in.weight", mark}},
        .same_data = true};
    const json reference = ranks.RunReference(options);
    const std::vector<json> sharded = ranks.RunSharded(options);
    ExpectParity(sharded, reference, kFloat32);
    std::set<std::string> managed;
    for (const std::string fqn : sharded[0]["managed"]) {
      managed.insert(fqn);
    }
    EXPECT_EQ(managed.size(), reference["parameters"].size() - 8 - 2 - 2) << mark;
    for (const auto& [fqn, values] : reference["parameters"].items()) {
      const bool left_out =
          fqn.starts_with("cell1.") || fqn.starts_with("out.") || fqn == "cell0.a.bias" || fqn == "in.weight";
      EXPECT_NE(managed.count(fqn) > 0, left_out) << mark << " " << fqn;
    }
  }
}

TEST(TorchAdaptor, APartWithItsOwnJobTrainsWithTheRest) {
  Ranks ranks(2);
  const WorkerOptions options{.ranks = 2, .steps = 20, .own_job = "cell1"};
  ExpectParity(ranks.RunSharded(options), ranks.RunReference(options), kFloat32);
}

TEST(TorchAdaptor, ShardRefusesBadInputAndLeavesTheModuleAlone) {
  Ranks ranks(1);
  const std::vector<json> results = ranks.RunSharded({.mode = "refusals", .model = "tied"});
  ASSERT_TRUE(results[0].contains("refused"));
  const json& refused = results[0]["refused"];
  const struct {
    const char* what;
    shardd::Code code;
    const char* text;
  } wanted[] = {
      {"null", shardd::Code::kInvalidArgument, "it is null"},
      {"unknown", shardd::Code::kInvalidArgument, "options.ignored names \"cell7\""},
      {"twice", shardd::Code::kInvalidArgument, "\"cell1\": it is left out twice"},
      {"root", shardd::Code::kInvalidArgument, "names the root"},
      {"tied", shardd::Code::kInvalidArgument, "\"cell2.a.weight\", which is not"},
      {"cut of nothing", shardd::Code::kInvalidArgument, "options.post_forward_shard_size names \"cell7\""},
      {"reshard of nothing", shardd::Code::kInvalidArgument, "options.reshard_after_forward names \"cell7\""},
      {"cut of a part", shardd::Code::kInvalidArgument, "\"cell0.a\": post_forward_shard_size is for fully sharded"},
      {"name that is no text", shardd::Code::kInvalidArgument, "name"},
      {"sparse", shardd::Code::kInvalidArgument, "\"weight\": it is no dense CPU tensor"},
      {"again", shardd::Code::kFailedPrecondition, "\"in.weight\": it belongs to a ShardedModule already"},
      {"a part of it", shardd::Code::kFailedPrecondition, "belongs to a ShardedModule already"},
      {"around it", shardd::Code::kFailedPrecondition, "\"inner.in.weight\": it belongs to a ShardedModule already"},
      {"after finish", shardd::Code::kFailedPrecondition, "belongs to a ShardedModule already"},
      {"after its end", shardd::Code::kFailedPrecondition, "belongs to a ShardedModule already"},
  };
  EXPECT_EQ(refused.size(), std::size(wanted));
  for (const auto& [what, code, text] : wanted) {
    const std::string got = refused.value(what, "nothing");
    EXPECT_EQ(got.substr(0, got.find(' ')), std::to_string(static_cast<int>(code))) << what << ": " << got;
    EXPECT_NE(got.find(text), std::string::npos) << what << ": " << got;
  }
  EXPECT_TRUE(results[0]["still usable"]);
}

// strategy full_shard: rank 0 alone; no_shard: all ranks.
TEST(TorchAdaptor, EditedFullParametersReachAllAndGradientsAreTheSteps) {
  for (const char* strategy : {"full_shard", "no_shard"}) {
    Ranks ranks(2);
    const std::vector<json> results = ranks.RunSharded(
        {.mode = "full_params", .ranks = 2, .model = "frozen", .strategy = strategy, .optimizer = "sgd"});
    const bool rank0_only = std::string(strategy) == "full_shard";
    ASSERT_TRUE(results[0].contains("after") && results[1].contains("after"));
    EXPECT_EQ(results[1].contains("before"), !rank0_only) << "nothing is given to the others";
    int frozen = 0;
    for (const auto& [fqn, before] : results[0]["before"].items()) {
      for (size_t i = 0; i < before.size(); ++i) {
        EXPECT_EQ(results[0]["after"][fqn][i], static_cast<float>(before[i].get<float>() + 1)) << fqn << " " << i;
      }
      frozen += results[0]["has gradient"][fqn].get<bool>() ? 0 : 1;
    }
    EXPECT_GT(frozen, 0);
    EXPECT_LT(frozen, static_cast<int>(results[0]["before"].size()));
    EXPECT_EQ(results[0]["after"], results[1]["after"]);
    for (const std::string fqn : results[1]["of cell1"]) {
      EXPECT_EQ(fqn.rfind("cell1.", 0), 0u) << fqn;
    }
    const std::string refused = results[0]["refused"];
    EXPECT_NE(refused.find("no such fully sharded module (got \"nowhere\")"), std::string::npos) << refused;
  }
}

TEST(TorchAdaptor, TensorsHaveStoragesOfTheirOwnAndRaiseWhileResharded) {
  Ranks ranks(1);
  const std::vector<json> results = ranks.RunSharded({.mode = "probe"});
  const json& result = results[0];
  ASSERT_TRUE(result.contains("raised"));
  for (const char* use :
       {"add", "matmul of a view", "clone", "forward without Run", "add after a step", "add after finish"}) {
    const std::string text = result["raised"][use];
    EXPECT_NE(text.find("parameter group \"cell1\" is resharded"), std::string::npos) << use << ": " << text;
  }
  const std::string root = result["raised"]["item"];
  EXPECT_NE(root.find("parameter group \"(root)\" is resharded"), std::string::npos) << root;
  for (const char* use : {"backward after finish", "backward without module"}) {
    EXPECT_NE(result["raised"][use], "") << use;
  }
  EXPECT_TRUE(result["same tensor"]);
  EXPECT_FALSE(result["any grad"]);
  EXPECT_EQ(result["storages"], result["parameters"]);
  for (const auto& [fqn, exact] : result["exact size"].items()) {
    EXPECT_TRUE(exact) << fqn;
  }
}

}  // namespace
}  // namespace shardd_test
