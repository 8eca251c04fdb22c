// The digest tells apart what must agree and nothing else, and FirstDifference says in words what differs.

#include <functional>

#include "absl/strings/escaping.h"
#include "tests/common/plan/random_spec.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;

// root(w) { a: fully sharded (w, bias frozen), b: fully sharded (w, tied to a.w), out: ignored (w) }
SpecBuilder Model() {
  SpecBuilder b(2);
  b.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
  b.config().set_gradient_divide_factor(2);  // its default would differ with the world size
  b.Param(0, "w", {4, 3});
  const int a = b.AddSharded(0, "a");
  b.Param(a, "w", {5, 2}, {.storage_id = 7});
  b.Param(a, "bias", {5}, {.requires_grad = false});
  const int bb = b.AddSharded(0, "b");
  b.Param(bb, "w", {5, 2}, {.storage_id = 7});
  b.Param(bb, "v", {6});
  b.Param(b.Add(0, "out", "Frozen", v1::MODULE_MARK_IGNORED), "w", {1});
  return b;
}

constexpr int kA = 1;
constexpr int kB = 2;
constexpr int kOut = 3;

struct Change {
  const char* name;
  std::function<void(SpecBuilder&)> apply;
  std::vector<const char*> expected;  // in FirstDifference(changed, original)
};

std::vector<Change> Changes() {
  return {
      {"world size", [](SpecBuilder& b) { b.spec().set_world_size(4); }, {"world size differs (got 4, want 2)"}},
      {"strategy",
       [](SpecBuilder& b) { b.config().set_strategy(v1::STRATEGY_SHARD_GRAD_OP); },
       {"config strategy", "got STRATEGY_SHARD_GRAD_OP", "want STRATEGY_FULL_SHARD"}},
      {"layout", [](SpecBuilder& b) { b.config().set_layout(v1::LAYOUT_DIM0); }, {"config layout"}},
      {"param_dtype",
       [](SpecBuilder& b) { b.config().mutable_mixed_precision()->set_param_dtype(v1::DTYPE_FLOAT16); },
       {"config mixed_precision.param_dtype", "DTYPE_FLOAT16", "DTYPE_UNSPECIFIED"}},
      {"reduce_dtype",
       [](SpecBuilder& b) { b.config().mutable_mixed_precision()->set_reduce_dtype(v1::DTYPE_FLOAT16); },
       {"config mixed_precision.reduce_dtype"}},
      {"mixed precision of one module",
       [](SpecBuilder& b) { b.module(kB).mutable_mixed_precision()->set_param_dtype(v1::DTYPE_BFLOAT16); },
       {"group \"b\": mixed_precision differs (got param_dtype bfloat16, reduce_dtype as submitted, want param_dtype "
        "as "
        "stored, reduce_dtype as submitted)"}},
      {"sums of one module",
       [](SpecBuilder& b) { b.module(kB).mutable_mixed_precision()->set_keep_low_precision_grads(true); },
       {"group \"b\": mixed_precision differs", "as submitted, kept"}},
      {"unshard_mode",
       [](SpecBuilder& b) { b.config().set_unshard_mode(v1::UNSHARD_MODE_POOLED); },
       {"config unshard_mode"}},
      {"limiter", [](SpecBuilder& b) { b.config().set_max_inflight_unshards(3); }, {"got 3, want 2"}},
      {"forward_prefetch",
       [](SpecBuilder& b) { b.config().set_forward_prefetch(true); },
       {"config forward_prefetch", "got true, want false"}},
      {"backward_prefetch",
       [](SpecBuilder& b) { b.config().set_backward_prefetch(v1::BACKWARD_PREFETCH_POST); },
       {"config backward_prefetch"}},
      {"optimizer",
       [](SpecBuilder& b) { b.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_ADAMW); },
       {"config optimizer.kind"}},
      {"momentum",
       [](SpecBuilder& b) { b.config().mutable_optimizer()->set_momentum(true); },
       {"config optimizer.momentum"}},
      {"number of optimizer groups",
       [](SpecBuilder& b) { b.config().mutable_optimizer()->add_groups(); },
       {"config optimizer.groups.size", "got 1, want 0"}},
      {"divide factor",
       [](SpecBuilder& b) { b.config().set_gradient_divide_factor(2.0000000000000004); },
       {"config gradient_divide_factor", "got 2.0000000000000004, want 2"}},
      {"strict_order", [](SpecBuilder& b) { b.config().set_strict_order(true); }, {"config strict_order"}},
      {"missing contribution",
       [](SpecBuilder& b) { b.config().set_allow_missing_contribution(true); },
       {"config allow_missing_contribution"}},
      {"silence timeout",
       [](SpecBuilder& b) { b.config().set_silence_timeout_ms(5); },
       {"config silence_timeout_ms", "got 5, want 120000"}},
      {"grace", [](SpecBuilder& b) { b.config().set_grace_ms(5); }, {"config grace_ms"}},
      {"shape",
       [](SpecBuilder& b) { b.module(0).mutable_parameters(0)->set_shape(1, 4); },
       {"parameter \"w\": shape differs (got [4, 4], want [4, 3])"}},
      {"same elements in another shape",
       [](SpecBuilder& b) {
         b.module(0).mutable_parameters(0)->set_shape(0, 3);
         b.module(0).mutable_parameters(0)->set_shape(1, 4);
       },
       {"parameter \"w\": shape differs (got [3, 4], want [4, 3])"}},
      {"dtype",
       [](SpecBuilder& b) { b.module(kA).mutable_parameters(1)->set_dtype(v1::DTYPE_FLOAT64); },
       {"parameter \"a.bias\": dtype differs (got float64, want float32)"}},
      {"requires_grad",
       [](SpecBuilder& b) { b.module(kA).mutable_parameters(1)->set_requires_grad(true); },
       {"parameter \"a.bias\": requires_grad differs (got true, want false)"}},
      {"renamed",
       [](SpecBuilder& b) { b.module(kB).mutable_parameters(1)->set_name("u"); },
       {"parameter \"b.v\": missing"}},
      {"removed",
       [](SpecBuilder& b) { b.module(kB).mutable_parameters()->RemoveLast(); },
       {"parameter \"b.v\": missing", "want [6] float32"}},
      {"added last", [](SpecBuilder& b) { b.Param(kB, "u", {9}); }, {"parameter \"b.u\": extra (got [9] float32"}},
      {"added first",
       [](SpecBuilder& b) {
         b.Param(0, "first", {4, 3});
         b.module(0).mutable_parameters()->SwapElements(0, 1);
       },
       {"parameter \"first\": extra"}},
      {"order of parameters",
       [](SpecBuilder& b) { b.module(kA).mutable_parameters()->SwapElements(0, 1); },
       {"position in traversal order differs (got 2, want 1)"}},
      {"tie cut",
       [](SpecBuilder& b) { b.module(kB).mutable_parameters(0)->set_storage_id(0); },
       {"parameter \"a.w\": tied names differs (got none, want \"b.w\")"}},
      {"group membership",
       [](SpecBuilder& b) { b.module(kB).set_mark(v1::MODULE_MARK_UNSPECIFIED); },
       {"parameter \"b.v\": parameter group differs (got \"(root)\", want \"b\")"}},
      {"reshard_after_forward",
       [](SpecBuilder& b) { b.module(kA).set_reshard_after_forward(v1::OVERRIDE_NO); },
       {"group \"a\": reshard_after_forward differs (got false, want true)"}},
      {"ignored",
       [](SpecBuilder& b) { b.module(kA).set_mark(v1::MODULE_MARK_IGNORED); },
       {"parameter \"a.w\": missing"}},
  };
}

TEST(Digest, EveryKindOfChangeIsSeenAndNamed) {
  const SpecBuilder original = Model();
  const std::string digest = original.Plan().digest;
  for (const Change& change : Changes()) {
    SpecBuilder changed = original;
    change.apply(changed);
    EXPECT_NE(changed.Plan().digest, digest) << change.name;
    const std::string difference = FirstDifference(changed.spec(), SpecBuilder(original).spec());
    for (const char* fragment : change.expected) {
      EXPECT_THAT(difference, HasSubstr(fragment)) << change.name;
    }
    EXPECT_NE(FirstDifference(SpecBuilder(original).spec(), changed.spec()), "") << change.name;
  }
}

// What an option that is false would add makes daemons of two builds strangers, in the middle of a job. Whoever raises
// the digest's format changes this value.
TEST(Digest, IsThatOfEarlierBuilds) {
  SpecBuilder b(2);
  b.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_ADAMW);
  b.Param(0, "w", {10});
  b.Param(b.AddSharded(0, "a"), "w", {10, 3});
  EXPECT_EQ(absl::BytesToHexString(b.Plan().digest).substr(0, 16), "5f8573ef5d962a0a");
}

TEST(Digest, MembershipOfOptimizerGroupsIsSeenAndNamed) {
  SpecBuilder first = Model();
  first.config().mutable_optimizer()->add_groups()->add_fqns("w");
  SpecBuilder second = Model();
  second.config().mutable_optimizer()->add_groups()->add_fqns("b.v");
  EXPECT_NE(first.Plan().digest, second.Plan().digest);
  EXPECT_THAT(FirstDifference(first.spec(), second.spec()),
              HasSubstr("parameter \"w\": optimizer group differs (got 1, want 0)"));
}

TEST(Digest, WhatMayDifferBetweenRanksIsNotSeen) {
  SpecBuilder original = Model();
  const std::string digest = original.Plan().digest;
  const std::vector<std::function<void(SpecBuilder&)>> changes = {
      [](SpecBuilder& b) { b.spec().set_name("another"); },
      [](SpecBuilder& b) { b.Param(kOut, "more", {100}); },
      [](SpecBuilder& b) { b.module(kOut).set_mark(v1::MODULE_MARK_REPLICATE); },
      [](SpecBuilder& b) { b.module(kOut).mutable_parameters()->Clear(); },
      [](SpecBuilder& b) { b.Add(kOut, "below", "Anything", v1::MODULE_MARK_FULLY_SHARD); },
      [](SpecBuilder& b) { b.spec().mutable_tree()->mutable_modules()->RemoveLast(); },
      [](SpecBuilder& b) { b.module(0).set_class_name("Wrapped"); },
      [](SpecBuilder& b) { b.module(kA).set_name("_fsdp_wrapped_module.a"); },
      [](SpecBuilder& b) { (void)b.module(kA).mutable_mixed_precision(); },  // what the job has
      [](SpecBuilder& b) { b.Param(0, "sharded_elsewhere", {3}, {.already_sharded = true}); },
      [](SpecBuilder& b) {
        b.module(kA).mutable_parameters(0)->set_storage_id(99);
        b.module(kB).mutable_parameters(0)->set_storage_id(99);
      },
      [](SpecBuilder& b) {  // the same groups by policy instead of marks
        b.module(kA).set_mark(v1::MODULE_MARK_UNSPECIFIED);
        b.module(kB).set_mark(v1::MODULE_MARK_UNSPECIFIED);
        b.spec().mutable_policy()->mutable_classes()->add_class_names("Block");
      },
  };
  for (size_t i = 0; i < changes.size(); ++i) {
    SpecBuilder changed = original;
    changes[i](changed);
    EXPECT_EQ(changed.Plan().digest, digest) << "change " << i;
    EXPECT_EQ(FirstDifference(changed.spec(), original.spec()), "") << "change " << i;
  }
}

TEST(Digest, AnInvalidDescriptionIsADifferenceThatSaysWhy) {
  SpecBuilder original = Model();
  SpecBuilder broken = Model();
  broken.module(0).mutable_parameters(0)->set_shape(0, 0);
  EXPECT_THAT(FirstDifference(broken.spec(), original.spec()), HasSubstr("extent of dimension 0"));
  EXPECT_THAT(FirstDifference(original.spec(), broken.spec()), HasSubstr("extent of dimension 0"));
}

TEST(Digest, EqualDigestsAndNoDifferenceAreTheSameThing) {
  constexpr uint32_t kPairs = 400;
  for (uint32_t seed = 1; seed <= kPairs; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seeds " << seed << " and " << seed + 1);
    RandomSpec got(seed);
    RandomSpec want(seed + 1);
    v1::JobSpec aligned = got.spec();
    // Other differences would hide those of the trees.
    aligned.set_world_size(want.spec().world_size());
    *aligned.mutable_config() = want.spec().config();
    const absl::StatusOr<ShardPlan> got_plan = PlanShards(aligned);
    const absl::StatusOr<ShardPlan> want_plan = PlanShards(want.spec());
    ASSERT_TRUE(got_plan.ok() && want_plan.ok());
    ASSERT_EQ(got_plan->digest == want_plan->digest, FirstDifference(aligned, want.spec()).empty());
  }
}

}  // namespace
}  // namespace shardd
