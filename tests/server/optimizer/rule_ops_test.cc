// The operations of the kinds that are rules: over all ranks they are the unsharded update.

#include "absl/strings/str_cat.h"
#include "common/plan/optimizer_kinds.h"
#include "common/tensor/update_log.h"
#include "common/tensor/update_scalars.h"
#include "server/device/cpu/cpu_ops.h"
#include "tests/server/optimizer/optimizer_fixture.h"

namespace shardd {
namespace {

constexpr v1::OptimizerKind kKinds[] = {v1::OPTIMIZER_KIND_ADAGRAD,          v1::OPTIMIZER_KIND_RMSPROP,
                                        v1::OPTIMIZER_KIND_CENTERED_RMSPROP, v1::OPTIMIZER_KIND_LION,
                                        v1::OPTIMIZER_KIND_ADAM_AMSGRAD,     v1::OPTIMIZER_KIND_ADAMW_AMSGRAD};

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
    const bool centered = kind == v1::OPTIMIZER_KIND_CENTERED_RMSPROP;
    const bool amsgrad = kind == v1::OPTIMIZER_KIND_ADAM_AMSGRAD || kind == v1::OPTIMIZER_KIND_ADAMW_AMSGRAD;
    params.rule = kind == v1::OPTIMIZER_KIND_ADAGRAD ? UpdateRule::kAdagrad
                  : kind == v1::OPTIMIZER_KIND_LION  ? UpdateRule::kLion
                  : amsgrad                          ? UpdateRule::kAmsgrad
                  : centered && h.momentum() > 0     ? UpdateRule::kRmspropCenteredMomentum
                  : centered                         ? UpdateRule::kRmspropCentered
                  : h.momentum() > 0                 ? UpdateRule::kRmspropMomentum
                                                     : UpdateRule::kRmsprop;
    params.lr = h.lr(), params.weight_decay = h.weight_decay(), params.eps = h.eps(), params.beta1 = h.beta1();
    params.beta2 = kind == v1::OPTIMIZER_KIND_LION || amsgrad ? h.beta2() : h.alpha();
    params.coupled_decay = kind == v1::OPTIMIZER_KIND_ADAM_AMSGRAD;
    params.momentum = h.momentum(), params.lr_decay = h.lr_decay();
    params.initial = h.initial_accumulator_value(), params.step = step, params.grad_scale = 0.5;
    return params;
  }
};

TEST_F(RuleOpsTest, KindsEqualTheUnshardedUpdate) {
  for (v1::OptimizerKind kind : kKinds) {
    SCOPED_TRACE(v1::OptimizerKind_Name(kind));
    SpecBuilder builder = OptimizerModel(3, v1::LAYOUT_FLAT, v1::STRATEGY_FULL_SHARD, v1::DTYPE_UNSPECIFIED, kind);
    builder.config().mutable_optimizer()->set_momentum(FindOptimizerKind(kind)->momentum_state != nullptr);
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
      std::vector<float> whole = ParamValues(plan_, static_cast<int>(p), 1), a(whole.size()), b(whole.size()),
                         c(whole.size());
      for (int step = 1; step <= 3; ++step) {
        const RuleParams params = ParamsOf(kind, groups[plan_.params[p].optimizer_group], step);
        RuleUpdateWith(params.rule, MakeRuleScalars(params), whole.data(), v1::DTYPE_FLOAT32,
                       ParamValues(plan_, static_cast<int>(p), step).data(), a.data(),
                       UpdateRuleStates(params.rule) >= 2 ? b.data() : nullptr, nullptr, v1::DTYPE_UNSPECIFIED,
                       static_cast<int64_t>(whole.size()), nullptr, 0,
                       UpdateRuleStates(params.rule) == 3 ? c.data() : nullptr);
      }
      EXPECT_EQ(Shard(static_cast<int>(p)), whole) << plan_.params[p].fqn;
    }
  }
}

// As a daemon leaves it that dies in the midst of a block: the next one puts the block back and does the rest.
TEST_F(RuleOpsTest, ATornUpdateIsCompletedWithTheSameBits) {
  constexpr int64_t kNumel = 3 * UpdateLog::kBlockNumel + 50, kDone = UpdateLog::kBlockNumel;
  constexpr int64_t kBytes = UpdateLog::kBlockNumel * static_cast<int64_t>(sizeof(float));
  for (int rule = 0; rule < kAllUpdateRules; ++rule) {
    std::vector<float> g(kNumel, 0.5F);
    const auto op_of = [&](std::vector<float>& p, std::vector<float>& a, std::vector<float>& b, std::vector<float>& c,
                           UpdateLog* log) {
      RuleOp op;
      op.params = {static_cast<UpdateRule>(rule), 0.1, 0.1, 1e-8, 0.9, 0.95, 0.8};
      op.p = p.data(), op.param_dtype = v1::DTYPE_FLOAT32, op.g = g.data(), op.a = a.data();
      op.b = UpdateRuleStates(op.params.rule) >= 2 ? b.data() : nullptr;
      op.c = UpdateRuleStates(op.params.rule) == 3 ? c.data() : nullptr;
      op.cast_dst = nullptr, op.cast_dtype = v1::DTYPE_UNSPECIFIED, op.numel = kNumel, op.logged = {log, 0};
      return op;
    };
    SCOPED_TRACE(UpdateRuleName(static_cast<UpdateRule>(rule)));
    std::vector<float> p(kNumel, 1), a(kNumel, 2), b(kNumel, 0.25F), c(kNumel, 0.75F), want_p = p, want_a = a,
                                                                                       want_b = b, want_c = c;
    RunCpuOp(op_of(want_p, want_a, want_b, want_c, nullptr), 0, kNumel);
    UpdateLog log = {};
    log.Begin(7);
    const DeviceOp op = op_of(p, a, b, c, &log);
    RunCpuOp(op, 0, kDone);
    log.Save(0, p.data() + kDone, kBytes);
    log.Save(1, a.data() + kDone, kBytes);
    log.Save(2, b.data() + kDone, kBytes);
    log.Save(3, c.data() + kDone, kBytes);
    log.Begun(kDone, UpdateLog::kBlockNumel);
    RunCpuOp(op_of(p, a, b, c, nullptr), kDone, 50);
    EXPECT_TRUE(CompleteCpuOp(op, 7).ok());
    EXPECT_TRUE(p == want_p && a == want_a && b == want_b && c == want_c);
  }
}

}  // namespace
}  // namespace shardd
