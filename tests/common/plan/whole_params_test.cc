#include "common/plan/whole_params.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "common/plan/largest_node.h"
#include "common/plan/node_part.h"
#include "common/plan/slab_holes.h"
#include "common/tensor/muon.h"
#include "tests/common/plan/node_specs.h"

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
  EXPECT_THAT(RanksOfWholeParams(Model(3).Plan(), present), ElementsAre(2, -1, 0, 1, 2, -1));
  EXPECT_THAT(RanksOfWholeParams(Model(2).Plan(), present), ElementsAre(1, -1, 0, 1, 1, -1));
  EXPECT_THAT(RanksOfWholeParams(Model(1).Plan(), present), ElementsAre(0, -1, 0, 0, 0, -1));
  present[2] = false;  // without a gradient
  EXPECT_THAT(RanksOfWholeParams(Model(3).Plan(), present), ElementsAre(1, -1, -1, 0, 2, -1));
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

TEST(Matrices, TheNodeThatNeedsMostIsPlanned) {
  SpecBuilder b = Model(2);
  for (const char* address : {"a:1", "b:1", "c:1"}) b.config().mutable_nodes()->add_addresses(address);
  for (const bool on_gpus : {false, true}) {
    std::vector<int64_t> totals;
    for (int node = 0; node < 3; ++node) {
      const ShardPlan plan = *PlanShards(b.spec(), node);
      totals.push_back(on_gpus ? MemoryOnGpus(plan, 2).TotalBytesOnGpus(2) : plan.memory.TotalBytes(2));
    }
    const absl::StatusOr<LargestNode> largest = PlanLargestNode(b.spec(), on_gpus);
    ASSERT_TRUE(largest.ok()) << largest.status();
    const auto most = std::max_element(totals.begin(), totals.end());
    EXPECT_EQ(largest->total_bytes, *most);
    EXPECT_EQ(largest->least_bytes, *std::min_element(totals.begin(), totals.end()));
    if (!on_gpus) {  // whose pages have all of this model
      EXPECT_LT(largest->least_bytes, largest->total_bytes) << "matrices are whole";
    }
    EXPECT_EQ(largest->plan.node, most - totals.begin());
  }
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
  EXPECT_TRUE(IsUpdatedWhole(b.Plan(), 0));
  EXPECT_FALSE(IsUpdatedWhole(b.Plan(), 1));
  SpecBuilder several = Model(2);
  several.config().mutable_optimizer()->mutable_groups(1)->clear_fqns();
  EXPECT_FALSE(IsUpdatedWhole(several.Plan(), 1));
}

SpecBuilder OnNodes(int nodes, int world_size, v1::Strategy strategy, v1::Layout layout = v1::LAYOUT_FLAT) {
  SpecBuilder b = Model(world_size);
  b.config().set_strategy(strategy);
  b.config().set_layout(layout);
  AddNodes(&b, nodes);
  return b;
}

// Of the parameters of Model, by place: where all of it is.
std::vector<int> PlacesOf(const ShardPlan& plan) {
  std::vector<int> places;
  for (size_t p = 0; p < plan.params.size(); ++p) places.push_back(PlaceOfWhole(plan, static_cast<int>(p)));
  return places;
}

const v1::Layout kLayouts[] = {v1::LAYOUT_FLAT, v1::LAYOUT_DIM0};

TEST(MatricesOverNodes, AreSharedByEachReplicasRanksAlone) {
  const std::vector<bool> present(6, true);
  for (const v1::Strategy strategy : {v1::STRATEGY_NO_SHARD, v1::STRATEGY_HYBRID_SHARD}) {
    for (int node = 0; node < 2; ++node) {
      const ShardPlan plan = PlanOn(OnNodes(2, 3, strategy), node);
      EXPECT_THAT(PlacesOf(plan), ::testing::Each(-1));
      EXPECT_EQ(RanksOfWholeParams(plan, present), RanksOfWholeParams(Model(3).Plan(), present));
      EXPECT_EQ(plan.memory.workspace_bytes, Model(3).Plan().memory.workspace_bytes);
    }
  }
}

TEST(MatricesOverNodes, AreWholeWhereThereIsLeastToDo) {
  // "large" to the first rank of node 0, "tall" to that of node 1, and the small ones to the ranks behind them.
  EXPECT_THAT(PlacesOf(PlanOn(OnNodes(2, 2, v1::STRATEGY_FULL_SHARD), 0)), ElementsAre(1, -1, 0, 2, 3, -1));
  // Two places: node 1, which has less, gets the small ones, too.
  EXPECT_THAT(PlacesOf(PlanOn(OnNodes(2, 1, v1::STRATEGY_SHARD_GRAD_OP), 0)), ElementsAre(1, -1, 0, 1, 1, -1));
  for (const v1::Layout layout : kLayouts) {
    const SpecBuilder b = OnNodes(3, 2, v1::STRATEGY_FULL_SHARD, layout);
    for (int node = 0; node < 3; ++node) {
      EXPECT_EQ(PlacesOf(PlanOn(b, node)), PlacesOf(PlanOn(b, 0))) << "all nodes say the same";
      EXPECT_EQ(PlanOn(b, node).digest, PlanOn(b, 0).digest);
    }
  }
}

TEST(MatricesOverNodes, EachElementHasOneRankAndEachMatrixOneAlone) {
  for (const v1::Layout layout : kLayouts) {
    for (const auto& [nodes, ranks] : {std::pair{2, 1}, {2, 2}, {3, 2}, {5, 3}}) {
      SCOPED_TRACE(absl::StrCat(v1::Layout_Name(layout), " ", nodes, " nodes of ", ranks));
      const SpecBuilder b = OnNodes(nodes, ranks, v1::STRATEGY_FULL_SHARD, layout);
      const ShardPlan first = PlanOn(b, 0);
      std::vector<std::vector<int>> held(first.params.size()), worked = held;  // by element
      std::vector<int> updating(first.params.size()), holders = updating;      // ranks
      for (size_t p = 0; p < first.params.size(); ++p) held[p].resize(first.params[p].numel);
      worked = held;
      for (int node = 0; node < nodes; ++node) {
        const ShardPlan plan = PlanOn(b, node);
        const std::vector<int> ranks_of = RanksOfWholeParams(plan, std::vector<bool>(plan.params.size(), true));
        for (int rank = 0; rank < ranks; ++rank) {
          for (size_t p = 0; p < plan.params.size(); ++p) {
            const ParamRange own = OwnedRange(plan, Purpose::kParameters, static_cast<int>(p), rank);
            for (int64_t i = own.first; i < own.first + own.numel; ++i) ++held[p][i];
            holders[p] += own.numel > 0 ? 1 : 0;
            updating[p] += ranks_of[p] == rank ? 1 : 0;
            if (ranks_of[p] == rank) {
              EXPECT_EQ(own.numel, plan.params[p].numel) << "who updates it has it";
            }
          }
          for (int f = 0; f < static_cast<int>(plan.flat_params.size()); ++f) {
            int64_t numel = 0, end = 0;
            for (const Segment& segment : WorkSegments(plan, f, rank)) {
              EXPECT_GE(segment.offset, end) << "in the order of offsets";
              end = segment.offset + segment.numel;
              numel += segment.numel;
              const int64_t at = segment.offset - plan.params[segment.param].offset;
              for (int64_t i = at; i < at + segment.numel; ++i) ++worked[segment.param][i];
            }
            EXPECT_LE(numel, plan.flat_params[f].shard_numel);
            EXPECT_EQ(GetShardMetadata(plan, f, rank)->padding_numel, 0);
          }
        }
      }
      for (size_t p = 0; p < first.params.size(); ++p) {
        EXPECT_THAT(held[p], ::testing::Each(1)) << first.params[p].fqn;
        EXPECT_THAT(worked[p], ::testing::Each(1)) << first.params[p].fqn;
        EXPECT_EQ(updating[p], IsUpdatedWhole(first, static_cast<int>(p)) ? 1 : 0) << first.params[p].fqn;
        if (IsUpdatedWhole(first, static_cast<int>(p))) {
          EXPECT_EQ(holders[p], 1) << first.params[p].fqn;
        }
      }
    }
  }
}

// Nothing but what the other ranks have of parameters that are cut.
TEST(MatricesOverNodes, ANodeWithoutAnyHasNoMemoryForThem) {
  SpecBuilder b(1);
  b.Param(0, "p", {256, 256});
  b.Param(0, "scale", {4});
  b.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
  auto& muon = *b.config().mutable_optimizer()->add_groups();
  muon.set_kind(v1::OPTIMIZER_KIND_MUON);
  muon.add_fqns("p");
  b.config().set_strategy(v1::STRATEGY_FULL_SHARD);
  for (const char* address : {"a:1", "b:1"}) b.config().mutable_nodes()->add_addresses(address);
  const MemoryPlan holds = PlanOn(b, 0).memory, holds_not = PlanOn(b, 1).memory;
  EXPECT_GE(holds.held_shards_bytes, 4 * 256 * 256);
  EXPECT_EQ(holds_not.held_shards_bytes, kHeldPageBytes) << "its half of \"scale\"";
  EXPECT_EQ(NodeRangeOf(PlanOn(b, 1), 0, 1).numel, 0);
}

// Each rank's part of the workspace lies within what is planned.
TEST(MatricesOverNodes, RanksThatUpdateHaveAWorkspace) {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const int nodes : {2, 3, 4}) {
      const SpecBuilder b = OnNodes(nodes, ranks, v1::STRATEGY_FULL_SHARD);
      for (int node = 0; node < nodes; ++node) {
        const ShardPlan plan = PlanOn(b, node);
        for (const int rank : RanksOfWholeParams(plan, std::vector<bool>(plan.params.size(), true))) {
          EXPECT_LE((rank + 1) * plan.workspace_stride_bytes, plan.memory.workspace_bytes);
        }
        EXPECT_LE(plan.memory.workspace_bytes, plan.workspace_stride_bytes * ranks);
      }
    }
  }
}

// Adafactor for "kernel", "tall" and "bias", AdamW for the rest.
SpecBuilder AdafactorModel(int world_size) {
  SpecBuilder b(world_size);
  b.Param(0, "kernel", {6, 5, 30, 40});
  b.Param(0, "tall", {6000, 30});
  b.Param(0, "bias", {7});
  b.Param(0, "table", {50, 50});
  auto& optimizer = *b.config().mutable_optimizer();
  optimizer.set_kind(v1::OPTIMIZER_KIND_ADAMW);
  b.config().set_trainers_never_write(true);
  auto& adamw = *optimizer.add_groups();
  adamw.set_kind(v1::OPTIMIZER_KIND_ADAMW);
  adamw.add_fqns("table");
  auto& adafactor = *optimizer.add_groups();
  adafactor.set_kind(v1::OPTIMIZER_KIND_ADAFACTOR);
  for (const char* fqn : {"kernel", "tall", "bias"}) adafactor.add_fqns(fqn);
  return b;
}

TEST(Adafactor, ParametersOfAnyShapeAreUpdatedWhole) {
  const ShardPlan plan = AdafactorModel(2).Plan();
  EXPECT_THAT(RanksOfWholeParams(plan, std::vector<bool>(4, true)), ElementsAre(1, 0, 1, -1));
  EXPECT_EQ(WholeWorkspaceBytes(plan, 3), 0);
  EXPECT_GE(plan.workspace_stride_bytes, WholeWorkspaceBytes(plan, 1));
}

TEST(Adafactor, StateIsThatOfRowsAndColumns) {
  const ShardPlan plan = AdafactorModel(1).Plan();
  const int64_t want[][2] = {{900, 1200}, {6000, 30}, {7, 0}, {2500, 2500}};
  for (int param = 0; param < 4; ++param) {
    for (int state = 0; state < 2; ++state) EXPECT_EQ(StateNumel(plan, param, state), want[param][state]) << param;
  }
}

// Whole pages: some hundred for one of the two states of "tall" alone, if each element had one.
TEST(Adafactor, MemoryIsPlannedForRowsAndColumns) {
  for (const int world : {1, 3}) {
    const ShardPlan plan = AdafactorModel(world).Plan();
    ASSERT_TRUE(HasHoles(plan, HeldSlab::kOptimizer));
    EXPECT_FALSE(HasHoles(plan, HeldSlab::kShards));
    EXPECT_EQ(plan.memory.held_shards_bytes, plan.memory.shards_bytes);
    EXPECT_GE(plan.memory.optimizer_bytes, 8 * (36000 + 180000));
    // Two states of four parameters, each with a page that it begins and one that it ends in.
    const int64_t states = 4 * (900 + 1200 + 6000 + 30 + 7 + 2 * 2500);
    EXPECT_GE(plan.memory.held_optimizer_bytes, states);
    EXPECT_LE(plan.memory.held_optimizer_bytes, states + 7 * 2 * kHeldPageBytes);
    int64_t end = 0;
    for (const ByteRange& range : HeldRanges(plan, HeldSlab::kOptimizer)) {
      EXPECT_GT(range.first, end - 1);
      end = range.end;
    }
    EXPECT_LE(end, plan.memory.optimizer_bytes + kHeldPageBytes);
  }
  SpecBuilder other(2);
  other.Param(0, "p", {40, 50});
  EXPECT_FALSE(HasHoles(other.Plan(), HeldSlab::kOptimizer));
}

TEST(Adafactor, CutOverNodesEachIsWholeOnOneRank) {
  for (const v1::Layout layout : kLayouts) {
    SpecBuilder b = AdafactorModel(2);
    b.config().set_strategy(v1::STRATEGY_FULL_SHARD);
    b.config().set_layout(layout);
    for (const char* address : {"a:1", "b:1"}) b.config().mutable_nodes()->add_addresses(address);
    int64_t held = 0;
    for (int node = 0; node < 2; ++node) {
      const ShardPlan plan = PlanOn(b, node);
      EXPECT_THAT(PlacesOf(plan), ElementsAre(2, 0, 1, -1));
      held += plan.memory.held_optimizer_bytes;
    }
    EXPECT_LE(held, 4 * (900 + 1200 + 6000 + 30 + 7 + 2 * 2500) + 9 * 2 * kHeldPageBytes);
  }
}

TEST(Adafactor, RowsOfNodesWithReplicasAreRefusedByName) {
  SpecBuilder b = AdafactorModel(1);
  b.config().set_strategy(v1::STRATEGY_HYBRID_SHARD);
  b.config().set_shard_group_size(2);
  for (const char* address : {"a:1", "b:1", "c:1", "d:1"}) b.config().mutable_nodes()->add_addresses(address);
  const absl::Status refused = PlanShards(b.spec(), 0).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr("OPTIMIZER_KIND_ADAFACTOR is not served where"));
}

}  // namespace
}  // namespace shardd
