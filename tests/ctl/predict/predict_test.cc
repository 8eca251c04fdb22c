#include "client/ctl/predict/predict.h"

#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/ctl/predict/simulation.h"
#include "client/ctl/predict/transfers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/plan/spec_builder.h"
#include "tests/ctl/small_model.h"

namespace shardd::ctl {
namespace {

using ::testing::HasSubstr;

constexpr int kBlocks = 6;
constexpr int64_t kBlockNumel = 1 << 20;
constexpr double kTokens = 1000;

// Six blocks of a MiB of elements inside a root that has next to nothing.
std::shared_ptr<const ShardPlan> Blocks(int ranks, int nodes, bool gpus, bool forward_prefetch = true,
                                        v1::OptimizerKind optimizer = v1::OPTIMIZER_KIND_ADAMW) {
  SpecBuilder builder(ranks);
  builder.config().set_trainers_never_write(true);
  builder.config().set_unshard_mode(v1::UNSHARD_MODE_POOLED);
  builder.config().set_forward_prefetch(forward_prefetch);
  builder.config().mutable_optimizer()->set_kind(optimizer);
  if (gpus) builder.config().set_unsharded_pools(ranks);
  for (int node = 0; nodes > 1 && node < nodes; ++node) {
    builder.config().mutable_nodes()->add_addresses(absl::StrCat("node", node, ":7100"));
  }
  builder.Param(0, "root", {4});
  for (int block = 0; block < kBlocks; ++block) {
    builder.Param(builder.AddSharded(0, absl::StrCat("b", block)), "w", {1024, 1024});
  }
  return std::make_shared<const ShardPlan>(builder.Plan());
}

// A forward of a block takes a millisecond, and so does a gather of four MiB over a link alone.
Machine Even(bool gpus) {
  Machine machine;
  machine.gpus = gpus;
  machine.flops_per_s = 2.0 * kBlockNumel * kTokens * 1e3;
  machine.memory_bytes_per_s = 1e15;
  machine.device_link_bytes_per_s = 4.0 * kBlockNumel * 1e3;
  machine.node_link_bytes_per_s = 4.0 * kBlockNumel * 1e3;
  return machine;
}

Prediction Of(const std::shared_ptr<const ShardPlan>& plan, const Fleet& fleet, const Machine& machine) {
  const absl::StatusOr<Prediction> prediction = Predict(plan, fleet, machine, {kTokens, false});
  EXPECT_TRUE(prediction.ok()) << prediction.status();
  return prediction.ok() ? *prediction : Prediction();
}

double Sum(const Prediction& p) {
  return p.compute_s + p.exposed_unshard_s + p.exposed_reduction_s + p.update_s + p.rest_s;
}

TEST(PredictTest, TimesOfAStepAddUp) {
  for (const bool gpus : {false, true}) {
    for (const bool shares_cores : {false, true}) {
      for (const int nodes : {1, 2, 4}) {
        Machine machine = Even(gpus);
        machine.shares_cores = shares_cores;
        machine.request_s = 2e-5;
        machine.transfer_s = 1e-4;
        machine.step_s = 1e-3;
        const Prediction p = Of(Blocks(2, nodes, gpus), {nodes, 2, gpus}, machine);
        EXPECT_NEAR(Sum(p), p.step_s, 1e-9) << gpus << nodes;
        double by_group = 0;
        for (const double seconds : p.exposed_unshard_of_group_s) by_group += seconds;
        EXPECT_NEAR(by_group, p.exposed_unshard_s, 1e-9);
        for (const Span& span : p.spans) {
          EXPECT_GE(span.begin_s, -1e-9);
          EXPECT_LE(span.end_s, p.step_s + 1e-9);
        }
      }
    }
  }
}

TEST(PredictTest, WithFreeLinksAStepIsItsComputation) {
  Machine machine = Even(/*gpus=*/true);
  machine.device_link_bytes_per_s = machine.node_link_bytes_per_s = 1e18;
  const Prediction p = Of(Blocks(2, 2, true), {2, 2, true}, machine);
  EXPECT_NEAR(p.step_s, kBlocks * 3e-3, 1e-5);  // a millisecond forward and two backward
}

TEST(PredictTest, WithFreeComputationAStepIsItsBytes) {
  Machine machine = Even(/*gpus=*/true);
  machine.flops_per_s = 1e30;
  machine.node_link_bytes_per_s = 1e18;
  const Prediction p = Of(Blocks(2, 1, true), {1, 2, true}, machine);
  EXPECT_GE(p.step_s, p.traffic.device_link_bytes / machine.device_link_bytes_per_s * 0.5);
  EXPECT_LE(p.compute_s, 1e-9);
  EXPECT_NEAR(p.exposed_unshard_s + p.exposed_reduction_s, p.step_s, 1e-6);
}

TEST(PredictTest, AnUpdateMovesTheStatesThatItsOptimizerHas) {
  Machine machine = Even(/*gpus=*/false);
  machine.memory_bytes_per_s = 1;
  const auto bytes = [&](v1::OptimizerKind optimizer) {
    return Of(Blocks(2, 1, false, true, optimizer), {1, 2, false}, machine).update_s;
  };
  constexpr double kReadAndWritten = 2 * 4;
  constexpr double kOfEach = kBlocks * kBlockNumel / 2.0;
  const double adamw = bytes(v1::OPTIMIZER_KIND_ADAMW);
  EXPECT_NEAR(adamw - bytes(v1::OPTIMIZER_KIND_LION), kReadAndWritten * kOfEach, 100);
  // Adafactor has 1,024 rows and 1,024 columns for each.
  EXPECT_NEAR(adamw - bytes(v1::OPTIMIZER_KIND_ADAFACTOR), kReadAndWritten * (2 * kOfEach - kBlocks * 1024), 100);
}

// A rank gets what it has not, once for forward and once for backward (but of the last blocks, which are there still),
// and sends as many sums.
TEST(PredictTest, BytesBetweenNodesAreTheLowerBound) {
  for (const int nodes : {2, 4}) {
    const Prediction p = Of(Blocks(2, nodes, true), {nodes, 2, true}, Even(true));
    const double of_block = 4.0 * kBlockNumel / 2 * (nodes - 1) / nodes;
    EXPECT_NEAR(p.traffic.node_link_bytes, (p.unshards - 1 + kBlocks) * of_block, 200);
    EXPECT_GE(p.unshards, 1 + kBlocks);
    EXPECT_LE(p.unshards, 1 + 2 * kBlocks);
  }
}

TEST(PredictTest, Float8GathersSendAByteForEachElement) {
  SpecBuilder builder(2);
  builder.config().mutable_mixed_precision()->set_param_dtype(v1::DTYPE_BFLOAT16);
  builder.config().mutable_nodes()->add_addresses("node0:7100");
  builder.config().mutable_nodes()->add_addresses("node1:7100");
  builder.Param(0, "w", {1024, 1024});
  const Fleet fleet = {2, 2, false};
  const Traffic bf16 = GatherTraffic(builder.Plan(), fleet, 0);
  builder.config().mutable_mixed_precision()->set_float8_gathers(true);
  const Traffic float8 = GatherTraffic(builder.Plan(), fleet, 0);
  // Half of it comes from the other node, over a link that two ranks share.
  EXPECT_EQ(bf16.node_link_bytes, 2.0 * kBlockNumel / 2 / 2);
  EXPECT_EQ(float8.node_link_bytes, (kBlockNumel + kBlockNumel / 128.0) / 2 / 2);
  EXPECT_EQ(float8.memory_bytes, bf16.memory_bytes);
}

TEST(PredictTest, OnCpusPrefetchHidesGathers) {
  const Fleet fleet = {2, 2, false};
  const Prediction without = Of(Blocks(2, 2, false, /*forward_prefetch=*/false), fleet, Even(false));
  const Prediction with = Of(Blocks(2, 2, false, /*forward_prefetch=*/true), fleet, Even(false));
  EXPECT_GT(with.prefetched, without.prefetched);
  EXPECT_LT(with.exposed_unshard_s, without.exposed_unshard_s - 1e-4);
}

TEST(PredictTest, WhereCoresAreSharedNothingIsHidden) {
  Machine machine = Even(/*gpus=*/false);
  const Fleet fleet = {2, 2, false};
  const Prediction apart = Of(Blocks(2, 2, false), fleet, machine);
  machine.shares_cores = true;
  const Prediction shared = Of(Blocks(2, 2, false), fleet, machine);
  EXPECT_GT(shared.step_s, apart.step_s);
  const double moved_s = shared.traffic.node_link_bytes / machine.node_link_bytes_per_s;
  EXPECT_NEAR(shared.step_s, kBlocks * 3e-3 + moved_s, 2e-4);
}

constexpr char kMachine[] =
    R"({"name": "a <machine>", "flopsPerS": 1e12, "memoryBytesPerS": 1e11, "deviceLinkBytesPerS": 1e11,
        "nodeLinkBytesPerS": 1e10, "groups": {"hidden": {"forwardS": 0.25, "backwardS": 0.5}}})";
TEST(PredictTest, AModelsStepIsToldAndDrawn) {
  const absl::StatusOr<PredictedModel> predicted = PredictModel(kSmallModel, 16, 2, kMachine, {1024, false});
  ASSERT_TRUE(predicted.ok()) << predicted.status();
  EXPECT_THAT(predicted->text, HasSubstr("small on a <machine>: 16 ranks on 2 nodes, full_shard, 1024 tokens"));
  EXPECT_THAT(predicted->text, HasSubstr("computation             750.00"));
  EXPECT_THAT(predicted->json, HasSubstr("\"compute_s\": 0.75"));
  EXPECT_THAT(predicted->picture, HasSubstr("backward hidden, 500.000 ms"));
  EXPECT_THAT(predicted->picture, HasSubstr("a &lt;machine&gt;"));
}

TEST(PredictTest, AFleetMayBeLargerThanWhatIsServed) {
  const absl::StatusOr<PredictedModel> served = PredictModel(kSmallModel, 512, 64, kMachine, {1024, false});
  const absl::StatusOr<PredictedModel> more = PredictModel(kSmallModel, 8192, 1024, kMachine, {1024, false});
  ASSERT_TRUE(served.ok() && more.ok()) << served.status() << more.status();
  EXPECT_FALSE(absl::StrContains(served->text, "not served"));
  EXPECT_THAT(more->text, HasSubstr("8192 ranks on 1024 nodes"));
  EXPECT_THAT(more->text, HasSubstr("more than 64 nodes are not served"));
}

TEST(PredictTest, WhatIsNoMachineIsSaid) {
  const auto error = [](const std::string& machine) {
    return std::string(PredictModel(kSmallModel, 2, 1, machine, {1, false}).status().message());
  };
  EXPECT_THAT(error("no json"), HasSubstr("no JSON object"));
  EXPECT_THAT(error("{}"), HasSubstr("is not given (want above zero)"));
  EXPECT_THAT(error(R"({"flops": 1})"), HasSubstr("member flops is unknown"));
  EXPECT_THAT(error(R"({"flopsPerS": "many"})"), HasSubstr("flopsPerS is no number"));
  EXPECT_THAT(error(R"({"groups": {"a": {"forward": 1}}})"), HasSubstr("groups.a has an unknown member forward"));
  EXPECT_THAT(std::string(PredictModel(kSmallModel, 100, 99, kMachine, {1, false}).status().message()),
              HasSubstr("as many ranks as the others"));
}

}  // namespace
}  // namespace shardd::ctl
