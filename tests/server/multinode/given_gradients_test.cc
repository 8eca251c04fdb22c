#include "server/multinode/given_gradients.h"

#include <gmock/gmock.h>

#include "server/multinode/param_mask.h"
#include "tests/common/plan/spec_builder.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Two nodes of one rank. Cut over nodes, the second parameter is node 0's alone.
ShardPlan PlanOf(v1::Strategy strategy) {
  SpecBuilder builder(1);
  builder.config().set_strategy(strategy);
  builder.config().set_layout(v1::LAYOUT_DIM0);
  for (const char* address : {"host0:7000", "host1:7000"}) {
    builder.config().mutable_nodes()->add_addresses(address);
  }
  builder.Param(0, "w", {64, 4});
  builder.Param(0, "b", {1, 4});
  return *PlanShards(builder.spec(), 0);
}

struct Gives {
  std::vector<bool> present;
  std::vector<bool> fresh;
};
v1::PeerMessage::Go Go(const std::vector<Gives>& of_nodes) {
  v1::PeerMessage::Go go;
  go.set_sequence(5);
  go.mutable_key()->set_step(3);
  for (const Gives& gives : of_nodes) {
    auto* added = go.add_gives();
    added->set_present(MaskOf(gives.present));
    added->set_fresh(MaskOf(gives.fresh));
  }
  return go;
}
v1::PeerMessage::Reduced Reduced(const std::vector<bool>& present, double sum = 0) {
  v1::PeerMessage::Reduced reduced;
  reduced.set_present(MaskOf(present));
  reduced.set_norm_scale(1);
  reduced.set_norm_sum(sum);
  return reduced;
}

TEST(GivenGradientsTest, WhatOneNodeGivesIsGiven) {
  const ShardPlan plan = PlanOf(v1::STRATEGY_HYBRID_SHARD);
  const auto given = GivenByAll(plan, Go({{{true, false}, {true, false}}, {{false, true}, {false, false}}}));
  ASSERT_TRUE(given.ok()) << given.status();
  EXPECT_THAT(given->present, ElementsAre(true, true));
  EXPECT_THAT(given->fresh, ElementsAre(true, false));
  EXPECT_EQ(given->sequence, 5u);
}

TEST(GivenGradientsTest, NodesThatReplaceAndAddAreNamed) {
  const ShardPlan plan = PlanOf(v1::STRATEGY_HYBRID_SHARD);
  const auto given = GivenByAll(plan, Go({{{true, false}, {false, false}}, {{true, false}, {true, false}}}));
  EXPECT_EQ(given.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(
      std::string(given.status().message()),
      HasSubstr("gradient of \"w\" replaces on node 1 and adds on node 0; all nodes must do the same (step=3)"));
}

TEST(GivenGradientsTest, OfParametersThatAreCutThoseCountThatHoldSome) {
  const ShardPlan plan = PlanOf(v1::STRATEGY_FULL_SHARD);
  ASSERT_TRUE(plan.cut_over_nodes);
  const auto given = GivenByAll(plan, Go({{{false, true}, {false, true}}, {{false, true}, {false, false}}}));
  ASSERT_TRUE(given.ok()) << given.status();
  EXPECT_THAT(given->fresh, ElementsAre(false, true));
}

TEST(GivenGradientsTest, PresenceIsWhatHoldersSay) {
  const ShardPlan plan = PlanOf(v1::STRATEGY_FULL_SHARD);
  EXPECT_THAT(PresentOnHolders(plan, {Reduced({true, true}), Reduced({true, true})}), ElementsAre(true, true));
  EXPECT_THAT(PresentOnHolders(plan, {Reduced({true, false}), Reduced({true, true})}), ElementsAre(true, false));
}

TEST(GivenGradientsTest, TheNormIsOfAllParts) {
  const ShardPlan plan = PlanOf(v1::STRATEGY_FULL_SHARD);
  EXPECT_DOUBLE_EQ(NormOverNodes(plan, 2, {Reduced({}, 9), Reduced({}, 16)}).value(), 5);
}

TEST(ParamMaskTest, BitsThatAreNotThereAreFalse) {
  const std::vector<bool> bits = {true, false, true, false, false, false, false, false, true};
  EXPECT_EQ(BitsOf(MaskOf(bits), bits.size()), bits);
  EXPECT_FALSE(HasBit(MaskOf(bits), 100));
}

}  // namespace
}  // namespace shardd
