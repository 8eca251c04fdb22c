// What goes in: which modules and parameters are managed, under which names, and what is refused.

#include <ctime>
#include <limits>

#include "tests/common/plan/spec_builder.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

TEST(Tree, NamesAreFreeOfWrappersAndLookupsTakeWrappedNames) {
  SpecBuilder b;
  const int ddp = b.Add(0, "module", "DDP");
  const int layers = b.Add(ddp, "layers", "ModuleList");
  const int fsdp = b.Add(layers, "0", "FSDP");
  const int checkpoint = b.Add(fsdp, "_fsdp_wrapped_module", "Checkpoint");
  const int block = b.Add(checkpoint, "_checkpoint_wrapped_module", "Block", v1::MODULE_MARK_FULLY_SHARD);
  b.Param(block, "weight", {3});
  const ShardPlan plan = b.Plan();
  EXPECT_THAT(GroupMembers(plan), ElementsAre("layers.0: layers.0.weight"));
  EXPECT_EQ(plan.FindParam("layers.0.weight"), 0);
  EXPECT_EQ(plan.FindParam("module._orig_mod.layers.0._checkpoint_wrapped_module.weight"), 0);
  EXPECT_EQ(plan.FindParam("layers.0.bias"), -1);
  EXPECT_EQ(plan.FindGroup("module.layers.0._fsdp_wrapped_module"), 0);
  EXPECT_EQ(plan.FindGroup("layers"), -1);
}

TEST(Tree, AModuleDeclaredAWrapperLosesItsNamePart) {
  SpecBuilder b;
  const int block = b.Add(0, "block");
  const int wrapper = b.Add(block, "my_checkpoint", "MyCheckpoint");
  b.module(wrapper).set_is_wrapper(true);
  const int inner = b.Add(wrapper, "mlp");
  b.Param(inner, "weight", {3});
  EXPECT_THAT(GroupMembers(b.Plan()), ElementsAre("(root): block.mlp.weight"));
}

TEST(Tree, LeftOutSubtreesAreNotEntered) {
  SpecBuilder b;
  b.Param(0, "w", {2});
  for (v1::ModuleMark mark : {v1::MODULE_MARK_IGNORED, v1::MODULE_MARK_REPLICATE, v1::MODULE_MARK_ALREADY_SHARDED}) {
    const int left_out = b.Add(0, absl::StrCat("out", static_cast<int>(mark)), "Block", mark);
    b.Param(left_out, "w", {2});
    const int below = b.AddSharded(left_out, "below");
    b.Param(below, "w", {0, -5}, {.dtype = v1::DTYPE_UNSPECIFIED});  // not ours, so not judged
  }
  EXPECT_THAT(GroupMembers(b.Plan()), ElementsAre("(root): w"));
}

TEST(Tree, AnAlreadyShardedParameterIsLeftOut) {
  SpecBuilder b;
  b.Param(0, "tensor_parallel", {2}, {.already_sharded = true});
  b.Param(0, "w", {2});
  EXPECT_THAT(GroupMembers(b.Plan()), ElementsAre("(root): w"));
}

TEST(Tree, LeavingOutOneNameOfATensorLeavesOutAll) {
  SpecBuilder b;
  b.Param(0, "w", {2});
  b.Param(0, "shared", {2}, {.storage_id = 9});
  const int ignored = b.Add(0, "ignored", "Block", v1::MODULE_MARK_IGNORED);
  b.Param(ignored, "shared", {2}, {.storage_id = 9});
  EXPECT_THAT(GroupMembers(b.Plan()), ElementsAre("(root): w"));
}

TEST(Tree, WithNothingToManageIsAnError) {
  SpecBuilder empty;
  EXPECT_TRUE(Invalid(empty.spec(), {"no parameters to manage"}));
  SpecBuilder ignored;
  ignored.module(0).set_mark(v1::MODULE_MARK_IGNORED);
  ignored.Param(0, "w", {2});
  EXPECT_TRUE(Invalid(ignored.spec(), {"no parameters to manage"}));
  v1::JobSpec no_modules = empty.spec();
  no_modules.mutable_tree()->clear_modules();
  EXPECT_TRUE(Invalid(no_modules, {"number of modules", "got 0"}));
}

TEST(Tree, TiedParametersAreStoredOnceWhereFirstUsed) {
  SpecBuilder b;
  const int embedding = b.AddSharded(0, "embedding");
  b.Param(embedding, "weight", {5, 2}, {.storage_id = 1});
  b.Param(embedding, "weight_again", {5, 2}, {.storage_id = 1});
  const int head = b.AddSharded(0, "head");
  b.Param(head, "bias", {5});
  b.Param(head, "weight", {5, 2}, {.storage_id = 1});
  const ShardPlan plan = b.Plan();
  EXPECT_THAT(GroupMembers(plan), ElementsAre("embedding: embedding.weight", "head: head.bias"));
  EXPECT_THAT(plan.params[0].aliases, ElementsAre("embedding.weight_again", "head.weight"));
  EXPECT_EQ(plan.FindParam("head.weight"), plan.FindParam("embedding.weight"));
  EXPECT_THAT(plan.groups[0].also_unshards, IsEmpty());
  EXPECT_THAT(plan.groups[1].also_unshards, ElementsAre(0));
  EXPECT_EQ(plan.params[0].numel + plan.params[1].numel, 15);
}

TEST(Tree, AModuleWhoseParametersAllLieElsewhereStillUnshardsThem) {
  SpecBuilder b;
  const int embedding = b.AddSharded(0, "embedding");
  b.Param(embedding, "weight", {5, 2}, {.storage_id = 1});
  const int head = b.AddSharded(0, "head");
  b.Param(head, "weight", {5, 2}, {.storage_id = 1});
  const ShardPlan plan = b.Plan();
  EXPECT_THAT(GroupMembers(plan), ElementsAre("embedding: embedding.weight", "head:"));
  EXPECT_THAT(plan.groups[1].also_unshards, ElementsAre(0));
  EXPECT_EQ(plan.groups[1].gradient_slot, -1);
  EXPECT_THAT(plan.groups[1].flat_params, IsEmpty());
}

TEST(Tree, TiesThatDisagreeAreRefusedWithBothNames) {
  const auto tied = [](const std::vector<int64_t>& shape, DType dtype, bool requires_grad) {
    SpecBuilder b;
    b.Param(0, "a", {5, 2}, {.storage_id = 1});
    b.Param(0, "b", shape, {.dtype = dtype, .requires_grad = requires_grad, .storage_id = 1});
    return b.spec();
  };
  EXPECT_TRUE(Invalid(tied({2, 5}, v1::DTYPE_FLOAT32, true), {"\"b\"", "\"a\"", "[2, 5]", "[5, 2]"}));
  EXPECT_TRUE(Invalid(tied({5, 2}, v1::DTYPE_BFLOAT16, true), {"\"b\"", "bfloat16", "float32"}));
  EXPECT_TRUE(Invalid(tied({5, 2}, v1::DTYPE_FLOAT32, false), {"\"b\"", "frozen"}));
}

// Hostile and malformed trees.

TEST(Tree, ParentsOutOfOrderAreRefused) {
  for (int parent : {-1, -7, 1, 2, 100, std::numeric_limits<int>::max(), std::numeric_limits<int>::min()}) {
    SpecBuilder b;
    b.Param(0, "w", {2});
    b.Add(0, "a");
    b.module(1).set_parent(parent);
    EXPECT_TRUE(Invalid(b.spec(), {"\"a\"", "parent"})) << parent;
  }
}

TEST(Tree, ModulesThatAreNotInPreOrderAreRefused) {
  SpecBuilder b;
  b.Param(0, "w", {2});
  const int a = b.Add(0, "a");
  b.Add(0, "b");
  b.Add(a, "late");
  EXPECT_TRUE(Invalid(b.spec(), {"\"a.late\"", "pre-order"}));
}

TEST(Tree, TheFirstModuleMustBeTheRoot) {
  SpecBuilder named;
  named.module(0).set_name("model");
  named.Param(0, "w", {2});
  EXPECT_TRUE(Invalid(named.spec(), {"modules[0]"}));
  SpecBuilder with_parent;
  with_parent.module(0).set_parent(0);
  with_parent.Param(0, "w", {2});
  EXPECT_TRUE(Invalid(with_parent.spec(), {"modules[0]", "got parent 0"}));
}

TEST(Tree, ModuleNamesMustBePathsBelowTheirParents) {
  for (const char* name : {"", "a", "b.c", "ab", "a.", "a..b", ".a", "a.b.", "a.b..c"}) {
    SpecBuilder b;
    b.Param(0, "w", {2});
    const int a = b.Add(0, "a");
    b.Add(a, "x");
    b.module(2).set_name(name);
    EXPECT_TRUE(Invalid(b.spec(), {"plan module"})) << name;
  }
}

TEST(Tree, DuplicateNamesAreRefused) {
  SpecBuilder modules;
  modules.Param(0, "w", {2});
  modules.Add(0, "a");
  modules.Add(0, "a");
  EXPECT_TRUE(Invalid(modules.spec(), {"\"a\"", "two modules"}));
  SpecBuilder params;
  params.Param(0, "w", {2});
  params.Param(0, "w", {2});
  EXPECT_TRUE(Invalid(params.spec(), {"\"w\"", "two parameters"}));
  SpecBuilder aliases;
  aliases.Param(0, "w", {2}, {.storage_id = 1});
  aliases.Param(0, "w", {2}, {.storage_id = 1});
  EXPECT_TRUE(Invalid(aliases.spec(), {"\"w\"", "two parameters"}));
}

TEST(Tree, NamesThatCollideOnlyAfterCleaningAreRefused) {
  SpecBuilder params;
  params.Param(0, "w", {2});
  params.Param(params.Add(0, "module"), "w", {2});
  EXPECT_TRUE(Invalid(params.spec(), {"\"w\"", "two parameters"}));
  SpecBuilder groups;
  const int outer = groups.AddSharded(0, "block");
  groups.Param(outer, "a", {2});
  groups.Param(groups.AddSharded(outer, "_checkpoint_wrapped_module"), "b", {2});
  EXPECT_TRUE(Invalid(groups.spec(), {"group \"block\"", "shard only the outer one"}));
}

TEST(Tree, ParameterNamesMustBeNames) {
  for (const char* name : {"", "a.b", ".", "module", "_flat_param", "_orig_mod"}) {
    SpecBuilder b;
    b.Param(0, name, {2});
    EXPECT_TRUE(Invalid(b.spec(), {"not a parameter name"})) << name;
  }
}

TEST(Tree, UnprintableNamesAreRefusedAndShownEscaped) {
  const std::string bad[] = {std::string("nul\0", 4),
                             "line\nfeed",
                             "esc\x1b[2J",
                             "del\x7f",
                             "c1\xc2\x9b",
                             "tail\x80",
                             "lead\xc3",
                             "overlong\xc0\xaf",
                             "surrogate\xed\xa0\x80",
                             "big\xf4\x90\x80\x80",
                             "overlong3\xe0\x80\x80",
                             "\xff"};
  for (const std::string& name : bad) {
    SpecBuilder param;
    param.Param(0, name, {2});
    EXPECT_TRUE(Invalid(param.spec(), {"control characters or is not UTF-8"})) << name;
    SpecBuilder module;
    module.Param(module.Add(0, name), "w", {2});
    const absl::StatusOr<ShardPlan> plan = PlanShards(module.spec());
    ASSERT_EQ(plan.status().code(), absl::StatusCode::kInvalidArgument);
    for (char c : plan.status().message()) {
      ASSERT_TRUE(c >= 0x20 && c < 0x7f) << "raw byte in the error of " << name;
    }
    SpecBuilder class_name;
    class_name.Param(class_name.Add(0, "a", name), "w", {2});
    EXPECT_TRUE(Invalid(class_name.spec(), {"plan class"}));
  }
}

TEST(Tree, NamesMayUseAnyPrintableUtf8) {
  SpecBuilder b;
  b.Param(b.Add(0, "\xe5\xb1\xa4"), "gewicht_\xc3\xa4\xf0\x9f\x98\x80", {2});
  EXPECT_EQ(b.Plan().params.size(), 1u);
}

TEST(Tree, OverlongNamesAreRefusedWithoutRepeatingThem) {
  SpecBuilder b;
  b.Param(0, std::string(1 << 20, 'a'), {2});
  const absl::StatusOr<ShardPlan> plan = PlanShards(b.spec());
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_LT(plan.status().message().size(), 1000u);
}

TEST(Tree, ExtentsBelowOneAreRefused) {
  for (int64_t extent : {int64_t{0}, int64_t{-1}, std::numeric_limits<int64_t>::min()}) {
    for (int position = 0; position < 3; ++position) {
      std::vector<int64_t> shape = {4, 4, 4};
      shape[position] = extent;
      SpecBuilder b;
      b.Param(0, "w", shape);
      EXPECT_TRUE(Invalid(b.spec(), {"\"w\"", absl::StrCat("dimension ", position), absl::StrCat("got ", extent)}));
    }
  }
}

TEST(Tree, ProductsAndSumsThatOverflowAreRefused) {
  const std::vector<std::vector<int64_t>> shapes = {{kHuge},
                                                    {kHuge, kHuge},
                                                    {int64_t{1} << 32, int64_t{1} << 32},
                                                    {int64_t{1} << 33, int64_t{1} << 31},
                                                    {3, kHuge / 2},
                                                    {int64_t{1} << 42, 2},
                                                    {kMaxJobNumel + 1}};
  for (const std::vector<int64_t>& shape : shapes) {
    SpecBuilder b;
    b.Param(0, "w", shape);
    EXPECT_TRUE(Invalid(b.spec(), {"\"w\"", "too many elements"}));
  }
  SpecBuilder sum;
  sum.Param(0, "a", {kMaxJobNumel});
  EXPECT_TRUE(PlanShards(sum.spec()).ok());
  sum.Param(0, "b", {1});
  EXPECT_TRUE(Invalid(sum.spec(), {"\"b\"", "too many elements"}));
}

TEST(Tree, APoolWhoseSizeOverflowsIsRefused) {
  SpecBuilder b(kMaxWorldSize);
  b.config().set_unshard_mode(v1::UNSHARD_MODE_POOLED);
  b.config().set_strategy(v1::STRATEGY_SHARD_GRAD_OP);  // every group keeps its slot
  b.Param(0, "huge", {kMaxJobNumel - 20000});
  for (int i = 0; i < 20000; ++i) {
    b.Param(b.AddSharded(0, absl::StrCat("g", i)), "w", {1});
  }
  EXPECT_TRUE(Invalid(b.spec(), {"unsharded pool", "too large"}));
}

TEST(Tree, TooManyDimensionsAreRefused) {
  SpecBuilder b;
  b.Param(0, "w", std::vector<int64_t>(1000, 1));
  EXPECT_TRUE(Invalid(b.spec(), {"dimensions", "got 1000"}));
}

TEST(Tree, UnknownEnumsAreRefused) {
  SpecBuilder dtype;
  dtype.Param(0, "w", {2}, {.dtype = static_cast<DType>(77)});
  EXPECT_TRUE(Invalid(dtype.spec(), {"\"w\"", "dtype", "got 77"}));
  SpecBuilder mark;
  mark.Param(0, "w", {2});
  mark.module(0).set_mark(static_cast<v1::ModuleMark>(77));
  EXPECT_TRUE(Invalid(mark.spec(), {"mark", "got 77"}));
  SpecBuilder reshard;
  reshard.Param(0, "w", {2});
  reshard.module(0).set_reshard_after_forward(static_cast<v1::Override>(-3));
  EXPECT_TRUE(Invalid(reshard.spec(), {"reshard_after_forward", "got -3"}));
}

TEST(Tree, UntrainableDtypesAreRefusedWhereTheyRequireGradients) {
  for (DType dtype : {v1::DTYPE_INT64, v1::DTYPE_INT8, v1::DTYPE_BOOL}) {
    SpecBuilder trained;
    trained.Param(0, "w", {2}, {.dtype = dtype});
    EXPECT_TRUE(Invalid(trained.spec(), {"\"w\"", "cannot be trained", "requires_grad"}));
    SpecBuilder frozen;
    frozen.Param(0, "w", {2}, {.dtype = dtype, .requires_grad = false});
    EXPECT_EQ(frozen.Plan().params[0].optimizer_group, -1);
  }
}

TEST(Tree, DoublesAreTrainedByOptimizersInTheTrainersOnly) {
  SpecBuilder b;
  b.Param(0, "w", {6}, {.dtype = v1::DTYPE_FLOAT64});
  for (v1::OptimizerKind kind :
       {v1::OPTIMIZER_KIND_NONE, v1::OPTIMIZER_KIND_ADAMW, v1::OPTIMIZER_KIND_ADAM, v1::OPTIMIZER_KIND_SGD}) {
    b.config().mutable_optimizer()->set_kind(kind);
    EXPECT_TRUE(Invalid(b.spec(), {"\"w\"", "float64", v1::OptimizerKind_Name(kind), "convert"}));
  }
  b.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_TRAINER);
  b.config().set_trainers_never_write(false);
  const ShardPlan plan = b.Plan();
  EXPECT_EQ(plan.flat_params[0].unsharded_dtype, v1::DTYPE_FLOAT64);
  EXPECT_GE(plan.flat_params[0].slot_offset_bytes, 0);
}

TEST(Tree, WorldSizesOutOfRangeAreRefused) {
  for (int world_size : {0, -1, kMaxWorldSize + 1, std::numeric_limits<int>::max()}) {
    SpecBuilder b(world_size);
    b.Param(0, "w", {2});
    EXPECT_TRUE(Invalid(b.spec(), {"world size", absl::StrCat("got ", world_size)}));
  }
}

TEST(Tree, JobNamesThatAreNoFileNamesAreRefused) {
  for (const std::string& name :
       {std::string(), std::string("."), std::string(".."), std::string("a/b"), std::string("a b"), std::string("a\n"),
        std::string(129, 'a'), std::string("\xc3\xa4")}) {
    SpecBuilder b;
    b.spec().set_name(name);
    b.Param(0, "w", {2});
    EXPECT_TRUE(Invalid(b.spec(), {"not a job name"})) << name;
  }
  SpecBuilder longest;
  longest.spec().set_name(std::string(128, '-'));
  longest.Param(0, "w", {2});
  EXPECT_EQ(longest.Plan().params.size(), 1u);
}

// Processor seconds, printed and not judged: an ordinary build on an idle core takes 1 s and 2 s. What grows faster
// than the tree meets the time limit of the test.
double PlanSeconds(const v1::JobSpec& spec, absl::StatusOr<ShardPlan>& plan) {
  const std::clock_t start = std::clock();
  plan = PlanShards(spec);
  return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
}

TEST(Tree, AMillionParametersInOneModuleArePlannedInTime) {
  SpecBuilder b(8);
  for (int i = 0; i < kMaxParameters; ++i) {
    b.Param(0, absl::StrCat("p", i), {3});
  }
  absl::StatusOr<ShardPlan> plan;
  const double seconds = PlanSeconds(b.spec(), plan);
  ASSERT_TRUE(plan.ok()) << plan.status();
  RecordProperty("seconds", absl::StrCat(seconds));
  std::cout << "  " << kMaxParameters << " parameters, one group: " << seconds << " s\n";
  b.Param(0, "one_more", {3});
  EXPECT_TRUE(Invalid(b.spec(), {"too many parameters"}));
}

TEST(Tree, AMillionModulesEachAGroupArePlannedInTime) {
  SpecBuilder b(8);
  b.spec().mutable_policy()->mutable_always();
  for (int i = 1; i < kMaxModules; ++i) {
    b.Param(b.Add(0, absl::StrCat("m", i)), "w", {3});
  }
  absl::StatusOr<ShardPlan> plan;
  const double seconds = PlanSeconds(b.spec(), plan);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->groups.size(), static_cast<size_t>(kMaxModules - 1));
  std::cout << "  " << kMaxModules << " modules, each a group: " << seconds << " s\n";
  b.Add(0, "one_more");
  EXPECT_TRUE(Invalid(b.spec(), {"number of modules"}));
}

TEST(Tree, AChainAsDeepAsNamesAllowIsPlanned) {
  SpecBuilder b(2);
  b.config().set_unshard_mode(v1::UNSHARD_MODE_POOLED);
  int parent = 0;
  for (int i = 0; i < 2047; ++i) {
    parent = b.AddSharded(parent, "a");
    b.Param(parent, "w", {1});
  }
  const ShardPlan plan = b.Plan();
  EXPECT_EQ(plan.groups.back().depth, 2046);
  EXPECT_EQ(plan.pool_quota, 2047);
}

}  // namespace
}  // namespace shardd
