// A job that trains more: what becomes of its plan, and what may not change with it.

#include "common/plan/extend.h"

#include <random>

#include "tests/common/plan/property_fixture.h"

namespace shardd {
namespace {

// The job as it was when only some of its parameters were trained; tied names alike. Without optimizer groups.
v1::JobSpec Narrow(const v1::JobSpec& spec, uint32_t seed) {
  std::mt19937 random(seed);
  const bool frozen_storage[] = {random() % 2 == 0, random() % 2 == 0, random() % 2 == 0, random() % 2 == 0};
  v1::JobSpec narrow = spec;
  for (v1::Module& module : *narrow.mutable_tree()->mutable_modules()) {
    for (v1::Parameter& param : *module.mutable_parameters()) {
      const bool frozen = param.storage_id() == 0 ? random() % 2 == 0 : frozen_storage[param.storage_id() % 4];
      param.set_requires_grad(param.requires_grad() && !frozen);
    }
  }
  narrow.mutable_config()->mutable_optimizer()->clear_groups();
  return narrow;
}

class Extended : public Property {};

TEST_F(Extended, AnUnfrozenJobIsPlannedAsIfNeverFrozen) {
  uint32_t seed = 0;
  int extended = 0;
  ForAll([&](const v1::JobSpec& wide, const ShardPlan& plan) {
    const v1::JobSpec narrow = Narrow(wide, ++seed);
    const absl::StatusOr<ShardPlan> before = PlanShards(narrow);
    ASSERT_TRUE(before.ok()) << before.status();
    const absl::StatusOr<Extension> extension = Extend(wide, narrow, *before);
    ASSERT_TRUE(extension.ok()) << extension.status();
    ASSERT_EQ(extension->plan.digest, plan.digest);
    ASSERT_EQ(extension->what.empty(), before->digest == plan.digest);
    extended += extension->what.empty() ? 0 : 1;
    for (size_t p = 0; p < plan.params.size(); ++p) {  // what is known by index stays
      ASSERT_EQ(before->params[p].fqn, plan.params[p].fqn);
      ASSERT_EQ(before->params[p].group, plan.params[p].group);
      ASSERT_EQ(before->params[p].index_in_group, plan.params[p].index_in_group);
    }
    // A restarted program describes it as it was at first, and gets what it has become.
    const absl::StatusOr<v1::JobSpec> widened = Widened(narrow, wide, plan, /*own_groups=*/false);
    ASSERT_TRUE(widened.ok());
    ASSERT_EQ(PlanShards(*widened)->digest, plan.digest);
    // And asks again for what is there.
    ASSERT_EQ(Extend(narrow, wide, plan)->what, "");
  });
  EXPECT_GT(extended, 500);
}

SpecBuilder Model() {
  SpecBuilder b(2);
  b.config().set_trainers_never_write(false);
  b.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_TRAINER);
  b.config().mutable_optimizer()->set_trainer_states(0);
  const int a = b.AddSharded(0, "a");
  b.Param(a, "w", {4}, {.requires_grad = false});
  b.Param(a, "bias", {4}, {.requires_grad = false});
  b.Param(0, "head", {4});
  return b;
}

TEST(ExtendTest, NamesTheFirstParameterAndCountsTheOthers) {
  SpecBuilder job = Model();
  SpecBuilder asked = Model();
  for (v1::Parameter& param : *asked.module(1).mutable_parameters()) param.set_requires_grad(true);
  asked.config().mutable_optimizer()->set_trainer_states(2);
  const absl::StatusOr<Extension> extension = Extend(asked.spec(), job.spec(), job.Plan());
  ASSERT_TRUE(extension.ok()) << extension.status();
  EXPECT_EQ(extension->what, "parameter \"a.w\" (and 1 more)");
  EXPECT_EQ(extension->plan.optimizer_states, 2);
  EXPECT_EQ(Model().Plan().memory.optimizer_bytes, 0) << "nothing was planned for it before";
}

// As a program does that is restarted, and comes to what it unfroze one after the other.
TEST(ExtendTest, WhatTheJobWasHasItsGroups) {
  SpecBuilder job = Model();
  for (v1::Parameter& param : *job.module(1).mutable_parameters()) param.set_requires_grad(true);
  job.config().mutable_optimizer()->add_groups()->add_fqns("a.w");
  job.config().mutable_optimizer()->add_groups()->add_fqns("a.bias");
  SpecBuilder asked = Model();
  EXPECT_TRUE(*DescribesEarlier(asked.spec(), job.Plan()));
  asked.module(1).mutable_parameters(0)->set_requires_grad(true);
  asked.config().mutable_optimizer()->add_groups()->add_fqns("a.w");
  const absl::StatusOr<Extension> extension = Extend(asked.spec(), job.spec(), job.Plan());
  ASSERT_TRUE(extension.ok()) << extension.status();
  EXPECT_EQ(extension->what, "optimizer groups");
  EXPECT_FALSE(extension->trains_more);
  EXPECT_TRUE(*DescribesEarlier(asked.spec(), job.Plan()));
  EXPECT_FALSE(*DescribesEarlier(job.spec(), asked.Plan())) << "it trains more";
  SpecBuilder regrouped = asked;
  regrouped.config().mutable_optimizer()->add_groups()->add_fqns("head");
  EXPECT_FALSE(*DescribesEarlier(regrouped.spec(), job.Plan())) << "the job has it in no group";
}

TEST(ExtendTest, RefrozenParametersStayTrainedAndTheAskersGroupsCount) {
  SpecBuilder job = Model();
  job.module(1).mutable_parameters(0)->set_requires_grad(true);
  job.config().mutable_optimizer()->set_trainer_states(3);
  SpecBuilder asked = Model();
  asked.config().mutable_optimizer()->add_groups()->add_fqns("head");
  const absl::StatusOr<Extension> extension = Extend(asked.spec(), job.spec(), job.Plan());
  ASSERT_TRUE(extension.ok()) << extension.status();
  EXPECT_EQ(extension->what, "optimizer groups");
  EXPECT_EQ(extension->plan.optimizer_states, 3);
  EXPECT_TRUE(extension->plan.params[extension->plan.FindParam("a.w")].requires_grad);
  EXPECT_EQ(extension->plan.params[extension->plan.FindParam("head")].optimizer_group, 1);
}

// The bytes of its state would mean something else.
TEST(ExtendTest, AParameterKeepsItsOptimizer) {
  const auto with = [](v1::OptimizerKind of_head, bool with_bias) {
    SpecBuilder b = Model();
    for (v1::Parameter& param : *b.module(1).mutable_parameters()) param.set_requires_grad(true);
    auto& optimizer = *b.config().mutable_optimizer();
    optimizer.set_kind(v1::OPTIMIZER_KIND_ADAMW);
    auto& body = *optimizer.add_groups();
    body.add_fqns("a.w");
    body.set_kind(v1::OPTIMIZER_KIND_ADAMW);
    if (with_bias) {
      auto& more = *optimizer.add_groups();
      more.add_fqns("a.bias");
      more.set_kind(v1::OPTIMIZER_KIND_ADAMW);
    }
    auto& head = *optimizer.add_groups();
    head.add_fqns("head");
    head.set_kind(of_head);
    return b;
  };
  SpecBuilder job = with(v1::OPTIMIZER_KIND_LION, false);
  SpecBuilder wider = with(v1::OPTIMIZER_KIND_LION, true);
  SpecBuilder other = with(v1::OPTIMIZER_KIND_ADAMW, false);
  const absl::StatusOr<Extension> extension = Extend(wider.spec(), job.spec(), job.Plan());
  ASSERT_TRUE(extension.ok()) << extension.status();
  EXPECT_EQ(extension->plan.params[extension->plan.FindParam("head")].optimizer_group, 3);
  const absl::Status refused = Extend(other.spec(), job.spec(), job.Plan()).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr("OPTIMIZER_KIND_LION"));
  // A program that starts again describes the job as it was at first; another one is no narrower description of it.
  const ShardPlan wide = wider.Plan();
  EXPECT_EQ(PlanShards(*Widened(job.spec(), wider.spec(), wide, /*own_groups=*/false))->digest, wide.digest);
  EXPECT_NE(PlanShards(*Widened(other.spec(), wider.spec(), wide, /*own_groups=*/false))->digest, wide.digest);
}

TEST(ExtendTest, WhateverElseDiffersIsRefusedByName) {
  SpecBuilder job = Model();
  const auto refused = [&](const SpecBuilder& asked, const std::string& fragment) {
    SpecBuilder copy = asked;
    const absl::StatusOr<Extension> extension = Extend(copy.spec(), job.spec(), job.Plan());
    EXPECT_EQ(extension.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(extension.status().message()), ::testing::HasSubstr(fragment));
  };
  SpecBuilder asked = Model();
  asked.module(1).mutable_parameters(0)->set_requires_grad(true);
  asked.module(1).mutable_parameters(1)->set_shape(0, 5);
  refused(asked, "parameter \"a.bias\": shape differs (got [5], want [4])");
  asked = Model();
  asked.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_ADAMW);
  refused(asked, "config optimizer.kind differs");
  asked = Model();
  asked.module(1).mutable_mixed_precision()->set_param_dtype(v1::DTYPE_BFLOAT16);
  refused(asked, "group \"a\": mixed_precision differs");
  asked = Model();
  asked.Param(1, "more", {3});
  refused(asked, "parameter \"a.more\": extra");
}

}  // namespace
}  // namespace shardd
