#include <cmath>
#include <functional>
#include <limits>

#include "tests/server/optimizer/optimizer_fixture.h"

namespace shardd {
namespace {

using ::testing::HasSubstr;
using Change = std::function<void(v1::Step&)>;

class HyperParametersTest : public ::testing::Test {
 protected:
  static ShardPlan PlanOf(v1::OptimizerKind kind, bool momentum = true) {
    SpecBuilder builder = OptimizerModel(1, v1::LAYOUT_FLAT, v1::STRATEGY_FULL_SHARD, v1::DTYPE_UNSPECIFIED, kind);
    if (kind == v1::OPTIMIZER_KIND_SGD) builder.config().mutable_optimizer()->set_momentum(momentum);
    return builder.Plan();
  }
  static v1::Step StepOf(const v1::HyperParameters& h) {
    v1::Step step;
    *step.add_groups() = h;
    *step.add_groups() = h;
    return step;
  }
  static void ExpectRefused(const ShardPlan& plan, v1::Step step, const Change& change, const std::string& message) {
    change(step);
    const absl::Status status = CheckHyperParameters(plan, step);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << message;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
};

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST_F(HyperParametersTest, WhatPyTorchAcceptsIsAccepted) {
  const ShardPlan adamw = PlanOf(v1::OPTIMIZER_KIND_ADAMW);
  EXPECT_TRUE(CheckHyperParameters(adamw, StepOf(AdamWHyper(0, 0))).ok());
  v1::HyperParameters zero;
  EXPECT_TRUE(CheckHyperParameters(adamw, StepOf(zero)).ok());
  const ShardPlan sgd = PlanOf(v1::OPTIMIZER_KIND_SGD);
  v1::HyperParameters h = SgdHyper(0.1, 0.9);
  h.set_nesterov(true);
  EXPECT_TRUE(CheckHyperParameters(sgd, StepOf(h)).ok());
  h.set_nesterov(false);
  h.set_dampening(0.5);
  EXPECT_TRUE(CheckHyperParameters(sgd, StepOf(h)).ok());
  EXPECT_TRUE(CheckHyperParameters(PlanOf(v1::OPTIMIZER_KIND_SGD, false), StepOf(SgdHyper(0.1, 0))).ok());
}

TEST_F(HyperParametersTest, AdamWValuesThatPyTorchRefusesAreNamed) {
  const ShardPlan plan = PlanOf(v1::OPTIMIZER_KIND_ADAMW);
  const v1::Step step = StepOf(AdamWHyper(0.1, 0.1));
  const auto group1 = [](v1::Step& s) { return s.mutable_groups(1); };
  ExpectRefused(
      plan, step, [&](v1::Step& s) { group1(s)->set_lr(-0.1); }, "optimizer group 1: lr is out of range (got -0.1");
  ExpectRefused(
      plan, step, [&](v1::Step& s) { group1(s)->set_lr(kNan); }, "lr is out of range (got nan");
  ExpectRefused(
      plan, step, [&](v1::Step& s) { group1(s)->set_lr(INFINITY); }, "lr is out of range (got inf");
  ExpectRefused(
      plan, step, [&](v1::Step& s) { group1(s)->set_beta1(1); }, "beta1 is out of range (got 1, want [0, 1))");
  ExpectRefused(
      plan, step, [&](v1::Step& s) { group1(s)->set_beta2(-0.5); }, "beta2 is out of range (got -0.5");
  ExpectRefused(
      plan, step, [&](v1::Step& s) { group1(s)->set_eps(-1e-8); }, "eps is out of range");
  ExpectRefused(
      plan, step, [&](v1::Step& s) { group1(s)->set_weight_decay(-1); }, "weight_decay is out of range");
  ExpectRefused(
      plan, step, [&](v1::Step& s) { s.set_max_grad_norm(-1); }, "max_grad_norm is out of range");
  ExpectRefused(
      plan, step, [&](v1::Step& s) { s.set_max_grad_norm(kNan); }, "max_grad_norm is out of range");
}

TEST_F(HyperParametersTest, SgdValuesThatPyTorchRefusesAreNamed) {
  const ShardPlan plan = PlanOf(v1::OPTIMIZER_KIND_SGD);
  const v1::Step step = StepOf(SgdHyper(0.1, 0.9));
  const auto group0 = [](v1::Step& s) { return s.mutable_groups(0); };
  ExpectRefused(
      plan, step, [&](v1::Step& s) { group0(s)->set_momentum(-1); }, "optimizer group 0: momentum is out of range");
  ExpectRefused(
      plan, step, [&](v1::Step& s) { group0(s)->set_dampening(kNan); }, "dampening is not finite");
  ExpectRefused(
      plan, step,
      [&](v1::Step& s) {
        group0(s)->set_nesterov(true);
        group0(s)->set_momentum(0);
      },
      "nesterov needs momentum");
  ExpectRefused(
      plan, step,
      [&](v1::Step& s) {
        group0(s)->set_nesterov(true);
        group0(s)->set_dampening(0.5);
      },
      "nesterov needs momentum and no dampening");
  ExpectRefused(
      PlanOf(v1::OPTIMIZER_KIND_SGD, false), step, [](v1::Step&) {}, "momentum without a planned buffer");
}

TEST_F(HyperParametersTest, TheNumberOfGroupsIsThePlans) {
  const ShardPlan plan = PlanOf(v1::OPTIMIZER_KIND_ADAMW);
  const v1::Step step = StepOf(AdamWHyper(0.1, 0.1));
  ExpectRefused(
      plan, step, [](v1::Step& s) { s.mutable_groups()->RemoveLast(); }, "(got 1, want 2)");
  ExpectRefused(
      plan, step, [](v1::Step& s) { s.add_groups(); }, "(got 3, want 2)");
  SpecBuilder none(1);
  none.Param(0, "p", {4});
  const ShardPlan only_served = none.Plan();
  EXPECT_TRUE(CheckHyperParameters(only_served, v1::Step()).ok());
  ExpectRefused(
      only_served, step, [](v1::Step&) {}, "(got 2, want 0)");
}

TEST(ClipFactorTest, IsPyTorchsClipCoefficient) {
  EXPECT_EQ(ClipFactor(10, 0), 1);
  EXPECT_EQ(ClipFactor(0.5, 1), 1);
  EXPECT_DOUBLE_EQ(ClipFactor(4, 1), 1 / (4 + 1e-6));
  EXPECT_EQ(ClipFactor(0, 1), 1);
  EXPECT_EQ(ClipFactor(INFINITY, 1), 0);
  EXPECT_TRUE(std::isnan(ClipFactor(kNan, 1)));
}

}  // namespace
}  // namespace shardd
