// Strategies, splits of the world and placements: what each comes to, and what is refused.

#include "common/plan/placement.h"

#include <numeric>

#include "tests/common/plan/spec_builder.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

SpecBuilder Model(int world_size, v1::Strategy strategy = v1::STRATEGY_FULL_SHARD) {
  SpecBuilder b(world_size);
  b.config().set_strategy(strategy);
  b.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_ADAMW);
  b.Param(0, "w", {16, 2});
  return b;
}

SpecBuilder Hybrid(int world_size, int size) {
  SpecBuilder b = Model(world_size, v1::STRATEGY_HYBRID_SHARD);
  b.config().set_shard_group_size(size);
  return b;
}

void Group(SpecBuilder& b, const std::vector<int>& ranks) {
  v1::ShardGroup* group = b.config().add_shard_groups();
  for (int rank : ranks) group->add_ranks(rank);
}

// Pieces of parameters, gradients, optimizer state.
std::vector<int> Cut(const ShardPlan& plan) { return {plan.placement.cut.begin(), plan.placement.cut.end()}; }

std::vector<int> FirstElements(const ShardPlan& plan, Purpose purpose) {
  std::vector<int> firsts;
  for (int rank = 0; rank < plan.world_size; ++rank) {
    firsts.push_back(static_cast<int>(OwnedRange(plan, purpose, 0, rank).first));
  }
  return firsts;
}

TEST(Strategies, EveryOneHasARowAndNoOther) {
  const google::protobuf::EnumDescriptor* strategies = v1::Strategy_descriptor();
  EXPECT_EQ(static_cast<int>(StrategyTable().size()), strategies->value_count() - 1);
  for (int i = 0; i < strategies->value_count(); ++i) {
    const auto strategy = static_cast<v1::Strategy>(strategies->value(i)->number());
    if (strategy == v1::STRATEGY_UNSPECIFIED) continue;
    EXPECT_EQ(RowOf(strategy).strategy, strategy);
    EXPECT_LE(RowOf(strategy).parameters, RowOf(strategy).gradients);
    EXPECT_LE(RowOf(strategy).gradients, RowOf(strategy).optimizer);
  }
}

TEST(Strategies, CutAndReshardAsTheirRowsSay) {
  const auto plan = [](v1::Strategy strategy) {
    SpecBuilder b = Model(4, strategy);
    b.Param(b.AddSharded(0, "inner"), "w", {8});
    if (RowOf(strategy).groups == StrategyRow::Groups::kGiven) b.config().set_shard_group_size(2);
    return b.Plan();
  };
  EXPECT_THAT(Cut(plan(v1::STRATEGY_FULL_SHARD)), ElementsAre(4, 4, 4));
  EXPECT_THAT(Cut(plan(v1::STRATEGY_SHARD_GRAD_OP)), ElementsAre(4, 4, 4));
  EXPECT_THAT(Cut(plan(v1::STRATEGY_NO_SHARD)), ElementsAre(1, 1, 1));
  EXPECT_THAT(Cut(plan(v1::STRATEGY_HYBRID_SHARD)), ElementsAre(2, 2, 2));
  EXPECT_THAT(Cut(plan(v1::STRATEGY_HYBRID_SHARD_ZERO2)), ElementsAre(2, 2, 2));
  EXPECT_TRUE(plan(v1::STRATEGY_FULL_SHARD).groups[1].reshard_after_forward);
  EXPECT_TRUE(plan(v1::STRATEGY_HYBRID_SHARD).groups[1].reshard_after_forward);
  EXPECT_FALSE(plan(v1::STRATEGY_HYBRID_SHARD).groups[0].reshard_after_forward) << "the root";
  EXPECT_FALSE(plan(v1::STRATEGY_HYBRID_SHARD_ZERO2).groups[1].reshard_after_forward);
  EXPECT_FALSE(plan(v1::STRATEGY_SHARD_GRAD_OP).groups[1].reshard_after_forward);
}

TEST(ShardGroups, BySizeAreNeighboursAndReplicasHoldTheSame) {
  const ShardPlan plan = Hybrid(4, 2).Plan();
  EXPECT_THAT(plan.placement.shard_index, ElementsAre(0, 1, 0, 1));
  EXPECT_THAT(plan.placement.replica_index, ElementsAre(0, 0, 1, 1));
  EXPECT_THAT(FirstElements(plan, Purpose::kParameters), ElementsAre(0, 16, 0, 16));
  ASSERT_EQ(plan.config.shard_groups_size(), 2);
  EXPECT_THAT(plan.config.shard_groups(1).ranks(), ElementsAre(2, 3));
}

TEST(ShardGroups, AsListedMayBeAnySplit) {
  SpecBuilder b = Model(4, v1::STRATEGY_HYBRID_SHARD_ZERO2);
  Group(b, {3, 0});
  Group(b, {1, 2});
  const ShardPlan plan = b.Plan();
  EXPECT_THAT(plan.placement.shard_index, ElementsAre(1, 0, 1, 0));
  EXPECT_THAT(plan.placement.replica_index, ElementsAre(0, 1, 1, 0));
  EXPECT_THAT(FirstElements(plan, Purpose::kParameters), ElementsAre(16, 0, 16, 0));
  EXPECT_EQ(plan.config.shard_group_size(), 2);
}

TEST(ShardGroups, OfAllRanksOfTheNodeIsTheDefault) {
  const ShardPlan plan = Model(4, v1::STRATEGY_HYBRID_SHARD).Plan();
  EXPECT_EQ(plan.placement.replicas, 1);
  EXPECT_EQ(plan.placement.shard_world_size, 4);
}

TEST(ShardGroups, SplitsMustCoverTheWorldOnceInEqualParts) {
  const auto refused = [](const std::vector<std::vector<int>>& groups, const std::vector<std::string>& fragments) {
    SpecBuilder b = Model(4, v1::STRATEGY_HYBRID_SHARD);
    for (const std::vector<int>& group : groups) Group(b, group);
    return Invalid(b.spec(), fragments);
  };
  EXPECT_TRUE(
      refused({{0, 1}, {2, 1}}, {"shard_groups", "rank 1 is in two places", "group 0 [0, 1]", "group 1 [2, 1]"}));
  EXPECT_TRUE(refused({{0, 1}, {2}}, {"group 1 [2]", "another size than group 0 [0, 1]", "got 1, want 2"}));
  EXPECT_TRUE(refused({{0, 1}}, {"rank 2 is in no group", "got [[0, 1]]"}));
  EXPECT_TRUE(refused({{0, 1}, {2, 4}}, {"group 1 [2, 4]", "got 4, want 0 <= rank < 4"}));
  EXPECT_TRUE(refused({{0, 1}, {2, -1}}, {"got -1"}));
  EXPECT_TRUE(refused({{}, {}}, {"group 0 []", "got 0"}));
  EXPECT_TRUE(refused({{0}, {1}, {2}, {3}, {}}, {"more groups than the job has ranks", "got 5, want at most 4"}));
  EXPECT_TRUE(refused({{0, 1, 2, 3, 0}}, {"more ranks are listed than the job has", "got 5, want 4"}));
  for (int size : {3, 5, 8, -2}) {
    EXPECT_TRUE(Invalid(Hybrid(4, size).spec(), {"shard_group_size", absl::StrCat("got ", size), "world size 4"}));
  }
  SpecBuilder both = Hybrid(4, 4);
  Group(both, {0, 1});
  Group(both, {2, 3});
  EXPECT_TRUE(Invalid(both.spec(), {"shard_group_size", "got 4, want 2"}));
}

TEST(ShardGroups, AreForHybridStrategiesOnly) {
  SpecBuilder b = Model(4);
  b.config().set_shard_group_size(2);
  EXPECT_TRUE(Invalid(b.spec(), {"shard_group_size", "got STRATEGY_FULL_SHARD", "use STRATEGY_HYBRID_SHARD"}));
  SpecBuilder copies = Model(4);
  copies.config().set_replica_copies(true);
  EXPECT_TRUE(Invalid(copies.spec(), {"replica_copies", "STRATEGY_FULL_SHARD"}));
}

TEST(ShardGroups, ThatDifferBetweenRanksAreNamedWithBothValues) {
  SpecBuilder other = Model(4, v1::STRATEGY_HYBRID_SHARD);
  Group(other, {0, 2});
  Group(other, {1, 3});
  EXPECT_EQ(FirstDifference(other.spec(), Hybrid(4, 2).spec()),
            "config shard_groups differs (got [[0, 2], [1, 3]], want [[0, 1], [2, 3]])");
  EXPECT_EQ(FirstDifference(Hybrid(4, 1).spec(), Hybrid(4, 2).spec()),
            "config shard_group_size differs (got 1, want 2)");
  SpecBuilder same = Model(4, v1::STRATEGY_HYBRID_SHARD);
  Group(same, {0, 1});
  Group(same, {2, 3});
  EXPECT_EQ(FirstDifference(same.spec(), Hybrid(4, 2).spec()), "");
}

TEST(ShardGroups, OfTheLargestWorldAreNamedInTwoKilobytes) {
  SpecBuilder reversed = Model(kMaxWorldSize, v1::STRATEGY_HYBRID_SHARD);
  std::vector<int> ranks(kMaxWorldSize);
  std::iota(ranks.rbegin(), ranks.rend(), 0);
  Group(reversed, ranks);
  const std::string text = FirstDifference(reversed.spec(), Model(kMaxWorldSize, v1::STRATEGY_HYBRID_SHARD).spec());
  EXPECT_NE(text.find("config shard_groups differs (got [[1023, 1022, "), std::string::npos) << text;
  EXPECT_NE(text.find(" more bytes, want [[0, 1, 2, "), std::string::npos) << text;
  EXPECT_LT(text.size(), 2100u);
  ranks.pop_back();
  SpecBuilder incomplete = Model(kMaxWorldSize, v1::STRATEGY_HYBRID_SHARD);
  Group(incomplete, ranks);
  const absl::Status status = PlanShards(incomplete.spec()).status();
  EXPECT_TRUE(Invalid(incomplete.spec(), {"rank 0 is in no group", "more bytes"}));
  EXPECT_LT(status.message().size(), 1200u);
}

TEST(Placements, OfZeroStagesCutOneKindOfStateMoreEach) {
  const auto placed = [](v1::Spread gradients, v1::Spread optimizer) {
    SpecBuilder b = Model(4, v1::STRATEGY_NO_SHARD);
    b.config().mutable_placement()->set_gradients(gradients);
    b.config().mutable_placement()->set_optimizer(optimizer);
    return b.Plan();
  };
  const ShardPlan stage1 = placed(v1::SPREAD_UNSPECIFIED, v1::SPREAD_WORLD);
  EXPECT_THAT(Cut(stage1), ElementsAre(1, 1, 4));
  EXPECT_THAT(FirstElements(stage1, Purpose::kOptimizer), ElementsAre(0, 8, 16, 24));
  const ShardPlan stage2 = placed(v1::SPREAD_WORLD, v1::SPREAD_UNSPECIFIED);
  EXPECT_THAT(Cut(stage2), ElementsAre(1, 4, 4));
  const ShardPlan stage3 = Model(4).Plan();

  const auto bytes = [](const ShardPlan& plan) {
    const PlacedMemory placed = PredictPlacedMemory(plan);
    return std::vector<int64_t>{placed.parameters_bytes, placed.gradients_bytes, placed.optimizer_bytes};
  };
  EXPECT_THAT(bytes(Model(4, v1::STRATEGY_NO_SHARD).Plan()), ElementsAre(128, 128, 256));
  EXPECT_THAT(bytes(stage1), ElementsAre(128, 128, 64));
  EXPECT_THAT(bytes(stage2), ElementsAre(128, 32, 64));
  EXPECT_THAT(bytes(stage3), ElementsAre(32, 32, 64));
  EXPECT_THAT(bytes(Hybrid(4, 2).Plan()), ElementsAre(64, 64, 128));
}

TEST(Placements, OverTheWorldCutAHybridShardOnceMore) {
  SpecBuilder b = Hybrid(4, 2);
  b.config().mutable_placement()->set_optimizer(v1::SPREAD_WORLD);
  const ShardPlan plan = b.Plan();
  EXPECT_THAT(Cut(plan), ElementsAre(2, 2, 4));
  EXPECT_THAT(FirstElements(plan, Purpose::kParameters), ElementsAre(0, 16, 0, 16));
  EXPECT_THAT(FirstElements(plan, Purpose::kOptimizer), ElementsAre(0, 16, 8, 24));
}

TEST(Placements, CoarserThanWhatComesBeforeAreRefused) {
  SpecBuilder b = Model(4);
  b.config().mutable_placement()->set_gradients(v1::SPREAD_REPLICATED);
  EXPECT_TRUE(Invalid(b.spec(), {"placement.gradients", "more coarsely than placement.parameters",
                                 "got SPREAD_REPLICATED, want SPREAD_SHARD_GROUP"}));
  b.config().mutable_placement()->set_gradients(v1::SPREAD_WORLD);
  b.config().mutable_placement()->set_optimizer(v1::SPREAD_SHARD_GROUP);
  EXPECT_TRUE(Invalid(b.spec(), {"placement.optimizer", "more coarsely than placement.gradients"}));
  b.config().mutable_placement()->set_parameters(static_cast<v1::Spread>(9));
  EXPECT_TRUE(Invalid(b.spec(), {"placement.parameters", "got 9"}));
}

TEST(Writers, OfAHybridJobAreTheRanksOfReplicaZero) {
  const ShardPlan plan = Hybrid(4, 2).Plan();
  EXPECT_EQ(WriteSegments(plan, 0, 0).size(), 1u);
  EXPECT_EQ(WriteSegments(plan, 0, 1)[0].offset, 16);
  EXPECT_THAT(WriteSegments(plan, 0, 2), IsEmpty());
  EXPECT_THAT(WriteSegments(plan, 0, 3), IsEmpty());
  const ShardPlan replicated = Model(3, v1::STRATEGY_NO_SHARD).Plan();
  EXPECT_EQ(WriteSegments(replicated, 0, 0)[0].numel, 32);
  EXPECT_THAT(WriteSegments(replicated, 0, 1), IsEmpty());
}

TEST(Writers, AreAllRanksWhereReplicasHaveCopies) {
  SpecBuilder b = Hybrid(4, 2);
  b.config().set_trainers_never_write(false);
  b.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_TRAINER);
  b.config().mutable_optimizer()->set_trainer_states(1);
  const MemoryPlan once = b.Plan().memory;
  b.config().set_replica_copies(true);
  const ShardPlan plan = b.Plan();
  EXPECT_EQ(plan.shard_copies, 2);
  EXPECT_EQ(plan.gradient_copies, 2);
  EXPECT_EQ(plan.memory.shards_bytes, 2 * once.shards_bytes);
  EXPECT_EQ(plan.memory.optimizer_bytes, 2 * once.optimizer_bytes);
  EXPECT_EQ(plan.memory.gradients_bytes, 2 * once.gradients_bytes);
  EXPECT_EQ(WriteSegments(plan, 0, 3)[0].offset, 16);
  // The state of the daemon's optimizer is its own; shards have copies where trainers edit them.
  b.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_ADAMW);
  b.config().mutable_optimizer()->set_trainer_states(0);
  EXPECT_EQ(b.Plan().shard_copies, 2);
  EXPECT_EQ(b.Plan().optimizer_copies, 1);
  b.config().set_trainers_never_write(true);
  EXPECT_EQ(b.Plan().shard_copies, 1);
  EXPECT_EQ(b.Plan().gradient_copies, 2);
}

TEST(PostForward, AnIntegerKeepsPartOfTheParametersUntilBackward) {
  const auto plan = [](int size) {
    SpecBuilder b = Hybrid(8, 4);
    b.Param(b.AddSharded(0, "inner"), "w", {64});
    b.module(1).set_post_forward_shard_size(size);
    return b.Plan();
  };
  EXPECT_EQ(plan(0).groups[1].post_forward_shard_size, 4);
  EXPECT_EQ(plan(4).groups[1].post_forward_shard_size, 4);
  EXPECT_EQ(plan(4).digest, plan(0).digest);
  EXPECT_TRUE(plan(2).groups[1].reshard_after_forward);
  EXPECT_EQ(plan(2).groups[1].post_forward_shard_size, 2);
  EXPECT_FALSE(plan(1).groups[1].reshard_after_forward) << "kept whole";
  const int64_t root_bytes = 32 * 4;
  EXPECT_EQ(PredictPlacedMemory(plan(0)).post_forward_bytes, root_bytes);
  EXPECT_EQ(PredictPlacedMemory(plan(2)).post_forward_bytes, root_bytes + 64 * 4 / 2);
  EXPECT_EQ(PredictPlacedMemory(plan(1)).post_forward_bytes, root_bytes + 64 * 4);
}

TEST(PostForward, WhereNothingIsCutThereIsNothingToKeep) {
  SpecBuilder b = Model(4, v1::STRATEGY_NO_SHARD);
  b.Param(b.AddSharded(0, "inner"), "w", {64});
  b.module(1).set_reshard_after_forward(v1::OVERRIDE_YES);
  EXPECT_TRUE(b.Plan().groups[1].reshard_after_forward);
  EXPECT_EQ(b.Plan().groups[1].post_forward_shard_size, 1);
  EXPECT_EQ(PredictPlacedMemory(b.Plan()).post_forward_bytes, 0);
  SpecBuilder replicated = Hybrid(8, 4);
  replicated.config().mutable_placement()->set_parameters(v1::SPREAD_REPLICATED);
  replicated.Param(replicated.AddSharded(0, "inner"), "w", {64});
  replicated.module(1).set_post_forward_shard_size(2);
  EXPECT_EQ(replicated.Plan().groups[1].post_forward_shard_size, 1);
  EXPECT_EQ(PredictPlacedMemory(replicated.Plan()).post_forward_bytes, 0);
  SpecBuilder world = Hybrid(8, 4);
  world.config().mutable_placement()->set_parameters(v1::SPREAD_WORLD);
  world.Param(world.AddSharded(0, "inner"), "w", {64});
  EXPECT_EQ(world.Plan().groups[1].post_forward_shard_size, 8);
  EXPECT_EQ(PredictPlacedMemory(world.Plan()).post_forward_bytes, 32 * 4) << "the root alone";
}

TEST(PostForward, OnlyFullyShardedModulesMayHaveAShardSize) {
  SpecBuilder b = Hybrid(8, 4);
  b.Param(b.Add(0, "inner"), "w", {64});
  b.module(1).set_post_forward_shard_size(2);
  EXPECT_TRUE(Invalid(b.spec(), {"module \"inner\"", "is for fully sharded modules (got 2, want 0)"}));
}

TEST(PostForward, OtherIntegersAreRefusedByGroup) {
  SpecBuilder b = Hybrid(8, 4);
  b.Param(b.AddSharded(0, "inner"), "w", {64});
  for (int size : {3, 8, -1}) {
    b.module(1).set_post_forward_shard_size(size);
    EXPECT_TRUE(Invalid(
        b.spec(), {"group \"inner\"", "post_forward_shard_size", absl::StrCat("got ", size), "shard group of 4"}));
  }
  b.module(1).set_post_forward_shard_size(2);
  b.module(1).set_reshard_after_forward(v1::OVERRIDE_NO);
  EXPECT_TRUE(Invalid(b.spec(), {"contradicts reshard_after_forward", "got 2 with OVERRIDE_NO"}));
  SpecBuilder other = Hybrid(8, 4);
  other.Param(other.AddSharded(0, "inner"), "w", {64});
  b.module(1).clear_reshard_after_forward();
  EXPECT_EQ(FirstDifference(b.spec(), other.spec()),
            "group \"inner\": post_forward_shard_size differs (got 2, want 4)");
}

}  // namespace
}  // namespace shardd
