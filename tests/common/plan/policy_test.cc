// Which modules become fully sharded modules, and in which order groups come.

#include "tests/common/plan/spec_builder.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;

// root(w:1) { layers { 0 { attn(w:6), mlp(w:8) }, 1 { attn(w:6), mlp(w:8) } }, head(w:4) }
SpecBuilder Transformer() {
  SpecBuilder b;
  b.Param(0, "w", {1});
  const int layers = b.Add(0, "layers", "ModuleList");
  for (const char* name : {"0", "1"}) {
    const int block = b.Add(layers, name, "Block");
    b.Param(b.Add(block, "attn", "Attention"), "w", {6});
    b.Param(b.Add(block, "mlp", "Mlp"), "w", {8});
  }
  b.Param(b.Add(0, "head", "Linear"), "w", {4});
  return b;
}

std::vector<std::string> GroupNames(const ShardPlan& plan) {
  std::vector<std::string> names;
  for (const GroupPlan& group : plan.groups) {
    names.push_back(group.name);
  }
  return names;
}

TEST(Policy, NoneLeavesOneRootGroupInTraversalOrder) {
  EXPECT_THAT(GroupMembers(Transformer().Plan()),
              ElementsAre("(root): w layers.0.attn.w layers.0.mlp.w layers.1.attn.w layers.1.mlp.w head.w"));
}

TEST(Policy, ClassesMatchExactly) {
  SpecBuilder b = Transformer();
  b.spec().mutable_policy()->mutable_classes()->add_class_names("Block");
  b.spec().mutable_policy()->mutable_classes()->add_class_names("Line");
  EXPECT_THAT(GroupMembers(b.Plan()), ElementsAre("(root): w head.w", "layers.0: layers.0.attn.w layers.0.mlp.w",
                                                  "layers.1: layers.1.attn.w layers.1.mlp.w"));
}

TEST(Policy, AlwaysShardsEveryModuleThatHasParametersButNoContainer) {
  SpecBuilder b = Transformer();
  b.spec().mutable_policy()->mutable_always();
  b.Param(b.Add(0, "extra", "torch::nn::ParameterListImpl"), "w", {2});
  EXPECT_THAT(GroupMembers(b.Plan()),
              ElementsAre("(root): w extra.w", "layers.0.attn: layers.0.attn.w", "layers.0.mlp: layers.0.mlp.w",
                          "layers.1.attn: layers.1.attn.w", "layers.1.mlp: layers.1.mlp.w", "head: head.w"));
}

TEST(Policy, MinNumelCountsOnlyWhatChildrenLeft) {
  SpecBuilder b = Transformer();
  b.spec().mutable_policy()->mutable_min_numel()->set_min_numel(8);
  // Each mlp has 8; the blocks are left with 6, which the root gets.
  EXPECT_THAT(GroupMembers(b.Plan()), ElementsAre("(root): w layers.0.attn.w layers.1.attn.w head.w",
                                                  "layers.0.mlp: layers.0.mlp.w", "layers.1.mlp: layers.1.mlp.w"));
}

TEST(Policy, MinNumelTakesAParentWhoseChildrenAreTooSmall) {
  SpecBuilder b = Transformer();
  b.spec().mutable_policy()->mutable_min_numel()->set_min_numel(14);
  EXPECT_THAT(GroupNames(b.Plan()), ElementsAre("(root)", "layers.0", "layers.1"));
  b.spec().mutable_policy()->mutable_min_numel()->set_min_numel(15);
  // "layers" has 28 left, but a ModuleList has no forward to unshard it.
  EXPECT_THAT(GroupNames(b.Plan()), ElementsAre("(root)"));
}

TEST(Policy, MinNumelSeesManualMarksAsAssigned) {
  SpecBuilder b = Transformer();
  b.spec().mutable_policy()->mutable_min_numel()->set_min_numel(14);
  b.module(3).set_mark(v1::MODULE_MARK_FULLY_SHARD);  // layers.0.attn
  EXPECT_THAT(GroupNames(b.Plan()), ElementsAre("(root)", "layers.0.attn", "layers.1"));
}

TEST(Policy, MinNumelCountsATiedTensorWhereItIsStored) {
  SpecBuilder b;
  b.Param(0, "w", {1});
  b.Param(b.Add(0, "first"), "w", {10}, {.storage_id = 5});
  b.Param(b.Add(0, "second"), "w", {10}, {.storage_id = 5});
  b.spec().mutable_policy()->mutable_min_numel()->set_min_numel(10);
  EXPECT_THAT(GroupMembers(b.Plan()), ElementsAre("(root): w", "first: first.w"));
  EXPECT_THAT(b.Plan().groups[0].also_unshards, ElementsAre(1));
}

TEST(Policy, NegativeMinNumelIsRefused) {
  SpecBuilder b = Transformer();
  b.spec().mutable_policy()->mutable_min_numel()->set_min_numel(-1);
  EXPECT_TRUE(Invalid(b.spec(), {"min_numel", "got -1"}));
}

TEST(Policy, FqnsNameModulesWithOrWithoutWrapperPrefixes) {
  SpecBuilder b = Transformer();
  auto& fqns = *b.spec().mutable_policy()->mutable_fqns();
  fqns.add_fqns("layers.1");
  fqns.add_fqns("module.head._orig_mod");
  fqns.add_fqns("(root)");
  EXPECT_THAT(GroupNames(b.Plan()), ElementsAre("(root)", "layers.1", "head"));
}

TEST(Policy, UnknownAndLeftOutFqnsAreErrorsThatNameThem) {
  SpecBuilder unknown = Transformer();
  unknown.spec().mutable_policy()->mutable_fqns()->add_fqns("layers.7");
  EXPECT_TRUE(Invalid(unknown.spec(), {"\"layers.7\"", "no such module"}));
  SpecBuilder parameter = Transformer();
  parameter.spec().mutable_policy()->mutable_fqns()->add_fqns("head.w");
  EXPECT_TRUE(Invalid(parameter.spec(), {"\"head.w\""}));
  SpecBuilder left_out = Transformer();
  left_out.module(2).set_mark(v1::MODULE_MARK_IGNORED);
  left_out.spec().mutable_policy()->mutable_fqns()->add_fqns("layers.0");
  EXPECT_TRUE(Invalid(left_out.spec(), {"\"layers.0\"", "left out"}));
}

TEST(Policy, AnFqnOfAWrappedModuleMeansTheOutermost) {
  SpecBuilder b;
  const int outer = b.Add(0, "block", "Checkpoint");
  const int inner = b.Add(outer, "_checkpoint_wrapped_module");
  b.Param(inner, "w", {2});
  b.spec().mutable_policy()->mutable_fqns()->add_fqns("block");
  const ShardPlan plan = b.Plan();
  ASSERT_EQ(plan.groups.size(), 1u);
  EXPECT_EQ(plan.groups[0].module, outer);
}

TEST(Policy, AnyOfIsAUnionAlsoWhenNested) {
  SpecBuilder b = Transformer();
  auto& any = *b.spec().mutable_policy()->mutable_any_of();
  any.add_policies()->mutable_classes()->add_class_names("Attention");
  auto& nested = *any.add_policies()->mutable_any_of();
  nested.add_policies()->mutable_fqns()->add_fqns("head");
  nested.add_policies()->mutable_min_numel()->set_min_numel(8);
  nested.add_policies();
  EXPECT_THAT(GroupNames(b.Plan()),
              ElementsAre("(root)", "layers.0.attn", "layers.0.mlp", "layers.1.attn", "layers.1.mlp", "head"));
}

TEST(Policy, ManualMarksComeInPreOrderWhateverTheyNest) {
  SpecBuilder b;
  const int outer = b.AddSharded(0, "outer");
  b.Param(b.AddSharded(outer, "inner"), "w", {2});
  b.Param(outer, "w", {2});
  b.Param(b.AddSharded(0, "last"), "w", {2});
  b.Param(0, "w", {2});
  const ShardPlan plan = b.Plan();
  EXPECT_THAT(GroupMembers(plan),
              ElementsAre("(root): w", "outer: outer.w", "outer.inner: outer.inner.w", "last: last.w"));
  EXPECT_THAT(
      std::vector<int>({plan.groups[0].depth, plan.groups[1].depth, plan.groups[2].depth, plan.groups[3].depth}),
      ElementsAre(0, 1, 2, 1));
}

TEST(Policy, FullyShardedModulesWithoutParametersHaveNoGroupOrDepth) {
  SpecBuilder b;
  const int empty = b.AddSharded(0, "empty");
  b.Param(b.AddSharded(empty, "inner"), "w", {2});
  const ShardPlan plan = b.Plan();
  EXPECT_THAT(GroupNames(plan), ElementsAre("empty.inner"));
  EXPECT_EQ(plan.groups[0].depth, 0);
  EXPECT_EQ(plan.FindGroup(""), -1);
}

TEST(Policy, TheSameMarkOrPolicyGivesTheSamePlan) {
  SpecBuilder marked = Transformer();
  marked.module(2).set_mark(v1::MODULE_MARK_FULLY_SHARD);
  marked.module(5).set_mark(v1::MODULE_MARK_FULLY_SHARD);
  SpecBuilder by_class = Transformer();
  by_class.spec().mutable_policy()->mutable_classes()->add_class_names("Block");
  EXPECT_EQ(marked.Plan().digest, by_class.Plan().digest);
}

TEST(Reshard, AfterForwardFollowsTheStrategyAndTheOverrideWins) {
  const auto flags = [](v1::Strategy strategy) {
    SpecBuilder b;
    b.config().set_strategy(strategy);
    b.Param(0, "w", {2});
    b.Param(b.AddSharded(0, "plain"), "w", {2});
    b.Param(b.AddSharded(0, "yes"), "w", {2});
    b.Param(b.AddSharded(0, "no"), "w", {2});
    b.module(2).set_reshard_after_forward(v1::OVERRIDE_YES);
    b.module(3).set_reshard_after_forward(v1::OVERRIDE_NO);
    std::vector<bool> result;
    for (const GroupPlan& group : b.Plan().groups) {
      result.push_back(group.reshard_after_forward);
    }
    return result;
  };
  EXPECT_THAT(flags(v1::STRATEGY_UNSPECIFIED), ElementsAre(false, true, true, false));
  EXPECT_THAT(flags(v1::STRATEGY_FULL_SHARD), ElementsAre(false, true, true, false));
  EXPECT_THAT(flags(v1::STRATEGY_SHARD_GRAD_OP), ElementsAre(false, false, true, false));
  EXPECT_THAT(flags(v1::STRATEGY_NO_SHARD), ElementsAre(false, false, true, false));
  SpecBuilder root;
  root.Param(0, "w", {2});
  root.module(0).set_reshard_after_forward(v1::OVERRIDE_YES);
  EXPECT_TRUE(root.Plan().groups[0].reshard_after_forward);
}

}  // namespace
}  // namespace shardd
