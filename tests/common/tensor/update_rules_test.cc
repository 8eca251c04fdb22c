#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "common/tensor/update_log.h"
#include "common/tensor/update_scalars.h"
#include "tests/common/tensor/isa_test_util.h"

namespace shardd {
namespace {

constexpr int kN = 5;
constexpr DType kFp32 = v1::DTYPE_FLOAT32;
constexpr DType kNoCast = v1::DTYPE_UNSPECIFIED;

constexpr UpdateRule kRules[] = {
    UpdateRule::kAdagrad,         UpdateRule::kRmsprop, UpdateRule::kRmspropMomentum,
    UpdateRule::kRmspropCentered, UpdateRule::kLion,    UpdateRule::kRmspropCenteredMomentum,
    UpdateRule::kAmsgrad};
static_assert(std::size(kRules) == kAllUpdateRules);

// As in update_test.cc, which says how its tables were made.
std::vector<float> Values(int64_t n, int seed) {
  std::vector<float> result;
  for (int64_t i = 0; i < n; ++i) result.push_back(static_cast<float>((i * 37 + seed * 11) % 41 - 20) / 16);
  return result;
}

struct Row {
  RuleParams params;
  float want[kN];
};
RuleParams Adagrad(double lr, double lr_decay, double weight_decay, double initial, double eps) {
  RuleParams params;
  params.rule = UpdateRule::kAdagrad;
  params.lr = lr, params.lr_decay = lr_decay, params.weight_decay = weight_decay;
  params.initial = initial, params.eps = eps;
  return params;
}
RuleParams Rmsprop(UpdateRule rule, double lr, double alpha, double eps, double weight_decay, double momentum) {
  RuleParams params;
  params.rule = rule;
  params.lr = lr, params.beta2 = alpha, params.eps = eps, params.weight_decay = weight_decay;
  params.momentum = momentum;
  return params;
}

struct State {
  explicit State(int64_t n) : p(Randoms(n, 1)), g(Randoms(n, 2)), a(Randoms(n, 3)), b(n), c(Randoms(n, 4)) {
    for (int64_t i = 0; i < n; ++i)
      a[i] = 1 + a[i] * a[i], b[i] = a[i] / 4;  // a is at least b * b, as centered needs it
  }
  std::vector<float> p, g, a, b, c;
};

RuleParams Usual(UpdateRule rule) {
  RuleParams params;
  params.rule = rule;
  params.lr = 1e-2, params.weight_decay = 0.1, params.eps = 1e-6, params.beta1 = 0.9, params.beta2 = 0.95;
  params.momentum = 0.8, params.lr_decay = 0.1, params.initial = 0.5, params.step = 3, params.grad_scale = 0.25;
  return params;
}

void Update(const RuleParams& params, void* p, DType dtype, const float* g, float* a, float* b, int64_t n,
            UpdateLog* log = nullptr, float* c = nullptr) {
  const int states = UpdateRuleStates(params.rule);
  RuleUpdateWith(params.rule, MakeRuleScalars(params), p, dtype, g, a, states >= 2 ? b : nullptr, nullptr, kNoCast, n,
                 log, 0, states == 3 ? c : nullptr);
}

class UpdateRulesTest : public IsaTest {};

TEST_P(UpdateRulesTest, AdagradAndRmspropGivePyTorchsParameters) {
  const Row rows[] = {
      {Adagrad(1e-2, 0, 0, 0, 1e-10), {-0.574474573f, -0.821343422f, -1.06788838f, 1.25133848f, 1.00721765f}},
      {Adagrad(0.1, 0.1, 0.25, 0.5, 1e-3), {-0.557872534f, -0.873665929f, -1.05284309f, 1.18526721f, 1.00626993f}},
      {Rmsprop(UpdateRule::kRmsprop, 1e-2, 0.99, 1e-8, 0, 0),
       {-0.682105422f, -0.901040435f, -1.11671042f, 1.26302004f, 1.0719111f}},
      {Rmsprop(UpdateRule::kRmsprop, 0.1, 0.9, 1e-3, 0.25, 0),
       {-0.340855926f, -1.03978395f, -1.0650363f, 1.01539254f, 0.985165596f}},
      {Rmsprop(UpdateRule::kRmspropMomentum, 1e-2, 0.9, 1e-8, 0.1, 0.9),
       {-0.681371033f, -0.811637342f, -1.02978861f, 1.28559566f, 1.0718751f}},
      {Rmsprop(UpdateRule::kRmspropCentered, 1e-2, 0.99, 1e-8, 0.1, 0),
       {-0.679489613f, -0.896084905f, -1.08984089f, 1.22781479f, 1.04843366f}},
  };
  for (const Row& row : rows) {
    std::vector<float> p = Values(kN, 1), a(kN), b(kN);
    RuleParams params = row.params;
    for (int step = 1; step <= 3; ++step) {
      params.step = step;
      Update(params, p.data(), kFp32, Values(kN, 1 + step).data(), a.data(), b.data(), kN);
    }
    for (int i = 0; i < kN; ++i) {
      EXPECT_NEAR(p[i], row.want[i], 4e-7f * std::fabs(row.want[i])) << UpdateRuleName(params.rule) << " " << params.lr;
    }
  }
}

TEST_P(UpdateRulesTest, LionAgreesWithTheFormulaInDouble) {
  const RuleParams c = Usual(UpdateRule::kLion);
  State s(1001);
  const State before = s;
  Update(c, s.p.data(), kFp32, s.g.data(), s.a.data(), nullptr, 1001);
  for (int i = 0; i < 1001; ++i) {
    const double g = before.g[i] * c.grad_scale;
    const double mixed = c.beta1 * before.a[i] + (1 - c.beta1) * g;
    if (std::fabs(mixed) < 1e-6) continue;  // of either sign
    const double p = before.p[i] * (1 - c.lr * c.weight_decay) - c.lr * (mixed > 0 ? 1 : -1);
    EXPECT_NEAR(s.p[i], p, 3e-7 * std::max(1.0, std::fabs(p))) << i;
    EXPECT_NEAR(s.a[i], c.beta2 * before.a[i] + (1 - c.beta2) * g, 1e-6) << i;
  }
  float p = 1, g = 0, m = 0;  // the sign of nothing is nothing
  Update(c, &p, kFp32, &g, &m, nullptr, 1);
  EXPECT_FLOAT_EQ(p, static_cast<float>(1 - c.lr * c.weight_decay));
}

RuleParams Amsgrad(double lr, double beta1, double beta2, double eps, double weight_decay, bool coupled) {
  RuleParams params;
  params.rule = UpdateRule::kAmsgrad;
  params.lr = lr, params.beta1 = beta1, params.beta2 = beta2, params.eps = eps, params.weight_decay = weight_decay;
  params.coupled_decay = coupled;
  return params;
}

// The last gradient is an eighth, so that the largest mean square is not the last one.
TEST_P(UpdateRulesTest, RulesOfThreeStatesGivePyTorchsParameters) {
  const Row rows[] = {
      {Amsgrad(0.1, 0.5, 0.6, 1e-3, 0.25, false),
       {-0.733190835f, -0.787431598f, -0.949038327f, 1.29029715f, 1.10327721f}},
      {Amsgrad(1e-2, 0.9, 0.95, 1e-8, 0.1, true), {-0.58486706f, -0.81075865f, -1.04703617f, 1.26384914f, 1.02178836f}},
      {Rmsprop(UpdateRule::kRmspropCenteredMomentum, 1e-2, 0.9, 1e-2, 0.1, 0.9),
       {-0.676083744f, -0.79280138f, -1.00326872f, 1.30082917f, 1.08627343f}},
  };
  for (const Row& row : rows) {
    std::vector<float> p = Values(kN, 1), a(kN), b(kN), c(kN);
    RuleParams params = row.params;
    for (int step = 1; step <= 3; ++step) {
      params.step = step;
      params.grad_scale = step == 3 ? 0.125 : 1;
      Update(params, p.data(), kFp32, Values(kN, 1 + step).data(), a.data(), b.data(), kN, nullptr, c.data());
    }
    for (int i = 0; i < kN; ++i) {
      EXPECT_NEAR(p[i], row.want[i], 8e-7f * std::fabs(row.want[i])) << UpdateRuleName(params.rule) << " " << params.lr;
      if (params.rule == UpdateRule::kAmsgrad) {
        EXPECT_GE(c[i], b[i]);
      }
    }
  }
}

// Shard boundaries, machine types and the log must be invisible.
TEST_P(UpdateRulesTest, RulesGiveTheSameBitsInPiecesAndEverywhere) {
  const int64_t n = 1027;
  for (UpdateRule rule : kRules) {
    SCOPED_TRACE(UpdateRuleName(rule));
    tensor::SetIsaForTest(GetParam());
    State whole(n), pieces(n), logged(n);
    Update(Usual(rule), whole.p.data(), kFp32, whole.g.data(), whole.a.data(), whole.b.data(), n, nullptr,
           whole.c.data());
    UpdateLog log = {};
    log.Begin(1);
    Update(Usual(rule), logged.p.data(), kFp32, logged.g.data(), logged.a.data(), logged.b.data(), n, &log,
           logged.c.data());
    EXPECT_EQ(log.done(1), n);
    tensor::SetIsaForTest(tensor::Isa::kBase);
    for (int64_t i = 0; i < n; i += 37) {
      Update(Usual(rule), pieces.p.data() + i, kFp32, pieces.g.data() + i, pieces.a.data() + i, pieces.b.data() + i,
             std::min<int64_t>(37, n - i), nullptr, pieces.c.data() + i);
    }
    for (const State* other : {&pieces, &logged}) {
      EXPECT_TRUE(whole.p == other->p && whole.a == other->a && whole.b == other->b && whole.c == other->c);
    }
  }
}

TEST_P(UpdateRulesTest, LowPrecisionIsComputedInFp32AndRoundedOnce) {
  const int64_t n = 517;
  for (UpdateRule rule : kRules) {
    for (DType dtype : {v1::DTYPE_BFLOAT16, v1::DTYPE_FLOAT16}) {
      State wide(n), narrow(n);
      std::vector<uint16_t> p = As16Bit(narrow.p, dtype);
      wide.p = AsFloat(p, dtype);
      Update(Usual(rule), wide.p.data(), kFp32, wide.g.data(), wide.a.data(), wide.b.data(), n, nullptr, wide.c.data());
      Update(Usual(rule), p.data(), dtype, narrow.g.data(), narrow.a.data(), narrow.b.data(), n, nullptr,
             narrow.c.data());
      EXPECT_TRUE(p == As16Bit(wide.p, dtype)) << UpdateRuleName(rule) << " " << DTypeName(dtype);
      EXPECT_TRUE(wide.a == narrow.a && wide.b == narrow.b && wide.c == narrow.c);
    }
  }
}

TEST_P(UpdateRulesTest, AdagradsFirstUpdateFindsTheInitialValueAlone) {
  RuleParams params = Adagrad(0.1, 0, 0, 4, 0);
  float p = 1, g = 3, sum = 99;  // what is there is not read
  params.step = 1;
  Update(params, &p, kFp32, &g, &sum, nullptr, 1);
  EXPECT_FLOAT_EQ(sum, 4 + 9);
  params.step = 2;
  Update(params, &p, kFp32, &g, &sum, nullptr, 1);
  EXPECT_FLOAT_EQ(sum, 4 + 9 + 9);
}

SHARDD_FOR_EACH_ISA(UpdateRulesTest);

}  // namespace
}  // namespace shardd
