#include "common/plan/matrices.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/tensor/muon.h"
#include "tests/common/plan/spec_builder.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;

// Muon for four matrices, AdamW for the rest.
SpecBuilder Model(int world_size) {
  SpecBuilder b(world_size);
  b.Param(0, "small", {3, 4});
  b.Param(0, "bias", {7});
  b.Param(0, "large", {40, 50});
  b.Param(0, "tall", {60, 30});
  b.Param(0, "row", {1, 8});
  b.Param(0, "table", {50, 50});
  auto& optimizer = *b.config().mutable_optimizer();
  optimizer.set_kind(v1::OPTIMIZER_KIND_MUON);
  b.config().set_trainers_never_write(true);
  auto& muon = *optimizer.add_groups();
  muon.set_kind(v1::OPTIMIZER_KIND_MUON);
  for (const char* fqn : {"small", "large", "tall", "row"}) muon.add_fqns(fqn);
  auto& adamw = *optimizer.add_groups();
  adamw.set_kind(v1::OPTIMIZER_KIND_ADAMW);
  for (const char* fqn : {"bias", "table"}) adamw.add_fqns(fqn);
  return b;
}

TEST(Matrices, OfMuonAreSharedByWhatTheyCost) {
  std::vector<bool> present(6, true);
  EXPECT_THAT(RanksOfMatrices(Model(3).Plan(), present), ElementsAre(2, -1, 0, 1, 2, -1));
  EXPECT_THAT(RanksOfMatrices(Model(2).Plan(), present), ElementsAre(1, -1, 0, 1, 1, -1));
  EXPECT_THAT(RanksOfMatrices(Model(1).Plan(), present), ElementsAre(0, -1, 0, 0, 0, -1));
  present[2] = false;  // without a gradient
  EXPECT_THAT(RanksOfMatrices(Model(3).Plan(), present), ElementsAre(1, -1, -1, 0, 2, -1));
}

TEST(Matrices, HaveTheirWorkspaceInTheMemoryPlan) {
  const int64_t largest = (MuonWorkspaceBytes(40, 50) + 4095) / 4096 * 4096;
  for (const int world : {1, 2, 9}) {
    const ShardPlan plan = Model(world).Plan();
    EXPECT_EQ(plan.workspace_stride_bytes, largest);
    EXPECT_EQ(plan.memory.workspace_bytes, largest * std::min(world, 4));
    ShardPlan without = plan;
    without.memory.workspace_bytes = 0;
    EXPECT_EQ(plan.memory.TotalBytes(world), without.memory.TotalBytes(world) + plan.memory.workspace_bytes);
  }
  SpecBuilder other(2);
  other.Param(0, "p", {40, 50});
  EXPECT_EQ(other.Plan().memory.workspace_bytes, 0);
}

TEST(Matrices, OtherParametersOfMuonAreRefusedByName) {
  SpecBuilder b = Model(2);
  b.config().mutable_optimizer()->mutable_groups(0)->add_fqns("bias");
  b.config().mutable_optimizer()->mutable_groups(1)->mutable_fqns()->erase(
      b.config().mutable_optimizer()->mutable_groups(1)->mutable_fqns()->begin());
  EXPECT_TRUE(Invalid(
      b.spec(), {"plan parameter \"bias\"", "OPTIMIZER_KIND_MUON", "got 1 dimensions, want 2", "another optimizer"}));
  SpecBuilder alone(1);
  alone.Param(0, "p", {2, 2});
  alone.Param(0, "kernel", {2, 2, 3});
  alone.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_MUON);
  EXPECT_TRUE(Invalid(alone.spec(), {"plan parameter \"kernel\"", "got 3 dimensions"}));
}

// A frozen one is nobody's, and what no optimizer has may be of any shape.
TEST(Matrices, WhatMuonDoesNotUpdateMayHaveAnyShape) {
  SpecBuilder b(2);
  b.Param(0, "p", {2, 2});
  b.Param(0, "frozen", {5}, {.requires_grad = false});
  b.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_MUON);
  EXPECT_TRUE(IsMatrix(b.Plan(), 0));
  EXPECT_FALSE(IsMatrix(b.Plan(), 1));
  SpecBuilder several = Model(2);
  several.config().mutable_optimizer()->mutable_groups(1)->clear_fqns();
  EXPECT_FALSE(IsMatrix(several.Plan(), 1));
}

TEST(Matrices, AreNotServedOverSeveralNodes) {
  for (const v1::Strategy strategy : {v1::STRATEGY_FULL_SHARD, v1::STRATEGY_NO_SHARD}) {
    SpecBuilder b = Model(2);
    b.config().set_strategy(strategy);
    b.config().mutable_nodes()->add_addresses("a:1");
    b.config().mutable_nodes()->add_addresses("b:1");
    b.config().set_unshard_mode(strategy == v1::STRATEGY_FULL_SHARD ? v1::UNSHARD_MODE_POOLED
                                                                    : v1::UNSHARD_MODE_ZERO_COPY);
    EXPECT_TRUE(Invalid(b.spec(), {"plan parameter \"small\"", "several nodes (got 2, want 1)"}));
  }
}

}  // namespace
}  // namespace shardd
