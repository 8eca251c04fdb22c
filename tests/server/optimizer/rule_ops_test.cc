// The operations of the kinds that are rules: over all ranks they are the unsharded update.

#include "absl/strings/str_cat.h"
#include "common/plan/optimizer_kinds.h"
#include "common/tensor/update_scalars.h"
#include "tests/server/optimizer/optimizer_fixture.h"

namespace shardd {
namespace {

constexpr v1::OptimizerKind kKinds[] = {v1::OPTIMIZER_KIND_ADAGRAD, v1::OPTIMIZER_KIND_RMSPROP,
                                        v1::OPTIMIZER_KIND_CENTERED_RMSPROP, v1::OPTIMIZER_KIND_LION};

class RuleOpsTest : public OptimizerTest {
 protected:
  static v1::HyperParameters Hyper(double lr, double momentum) {
    v1::HyperParameters h = AdamWHyper(lr, 0.1);
    h.set_momentum(momentum);
    h.set_alpha(0.7);
    h.set_lr_decay(0.5);
    h.set_initial_accumulator_value(0.25);
    return h;
  }
  static RuleParams ParamsOf(v1::OptimizerKind kind, const v1::HyperParameters& h, int64_t step) {
    RuleParams params;
    params.rule = kind == v1::OPTIMIZER_KIND_ADAGRAD            ? UpdateRule::kAdagrad
                  : kind == v1::OPTIMIZER_KIND_LION             ? UpdateRule::kLion
                  : kind == v1::OPTIMIZER_KIND_CENTERED_RMSPROP ? UpdateRule::kRmspropCentered
                  : h.momentum() > 0                            ? UpdateRule::kRmspropMomentum
                                                                : UpdateRule::kRmsprop;
    params.lr = h.lr(), params.weight_decay = h.weight_decay(), params.eps = h.eps(), params.beta1 = h.beta1();
    params.beta2 = kind == v1::OPTIMIZER_KIND_LION ? h.beta2() : h.alpha();
    params.momentum = h.momentum(), params.lr_decay = h.lr_decay();
    params.initial = h.initial_accumulator_value(), params.step = step, params.grad_scale = 0.5;
    return params;
  }
};

TEST_F(RuleOpsTest, KindsEqualTheUnshardedUpdate) {
  for (v1::OptimizerKind kind : kKinds) {
    SCOPED_TRACE(v1::OptimizerKind_Name(kind));
    SpecBuilder builder = OptimizerModel(3, v1::LAYOUT_FLAT, v1::STRATEGY_FULL_SHARD, v1::DTYPE_UNSPECIFIED, kind);
    builder.config().mutable_optimizer()->set_momentum(kind == v1::OPTIMIZER_KIND_RMSPROP);
    Start(builder);
    // Group 1 has no momentum, and leaves the buffer alone.
    const std::vector<v1::HyperParameters> groups = {Hyper(0.01, 0.9), Hyper(0.02, 0)};
    for (int step = 1; step <= 3; ++step) {
      WriteGradients(step, AllPresent());
      DecidedStep decided;
      decided.groups = groups;
      decided.clip_factor = 0.5;
      decided.present = AllPresent();
      decided.step_counts.assign(plan_.params.size(), step - 1);
      RunUpdate(decided);
    }
    for (size_t p = 0; p < plan_.params.size(); ++p) {
      if (!plan_.params[p].requires_grad) continue;
      std::vector<float> whole = ParamValues(plan_, static_cast<int>(p), 1), a(whole.size()), b(whole.size());
      for (int step = 1; step <= 3; ++step) {
        const RuleParams params = ParamsOf(kind, groups[plan_.params[p].optimizer_group], step);
        RuleUpdateWith(params.rule, MakeRuleScalars(params), whole.data(), v1::DTYPE_FLOAT32,
                       ParamValues(plan_, static_cast<int>(p), step).data(), a.data(),
                       UpdateRuleStates(params.rule) == 2 ? b.data() : nullptr, nullptr, v1::DTYPE_UNSPECIFIED,
                       static_cast<int64_t>(whole.size()));
      }
      EXPECT_EQ(Shard(static_cast<int>(p)), whole) << plan_.params[p].fqn;
    }
  }
}

}  // namespace
}  // namespace shardd
