#include <cmath>

#include "common/tensor/isa_internal.h"
#include "common/tensor/kernels.h"
#include "common/tensor/logged_blocks.h"
#include "common/tensor/trainable_internal.h"
#include "common/tensor/update_and_cast_internal.h"
#include "common/tensor/update_log.h"
#include "common/tensor/update_scalars.h"

namespace shardd {
namespace {

constexpr bool HasSecond(UpdateRule rule) {
  return rule == UpdateRule::kRmspropMomentum || rule == UpdateRule::kRmspropCentered ||
         rule == UpdateRule::kRmspropCenteredMomentum || rule == UpdateRule::kAmsgrad;
}
constexpr bool HasThird(UpdateRule rule) {
  return rule == UpdateRule::kRmspropCenteredMomentum || rule == UpdateRule::kAmsgrad;
}

// One element, in the order of PyTorch's single-tensor CPU implementation. Returns the parameter's new value.
template <UpdateRule kRule>
SHARDD_ALWAYS_INLINE float UpdateOne(const RuleScalars& c, float p, float grad, float* a, float* b, float* third) {
  if constexpr (kRule == UpdateRule::kLion) {
    const float g = grad * c.grad_scale;
    const float mixed = c.beta1 * *a + c.one_minus_beta1 * g;
    const float sign = static_cast<float>(mixed > 0) - static_cast<float>(mixed < 0);
    // Not a number stays one, as with torch.sign.
    const float direction = mixed != mixed ? mixed : sign;
    *a = c.beta2 * *a + c.one_minus_beta2 * g;
    return p * c.decay - c.step_size * direction;
  }
  const float g = grad * c.grad_scale + c.weight_decay * p;
  if constexpr (kRule == UpdateRule::kAmsgrad) {
    const float mean = *a + c.one_minus_beta1 * (g - *a);
    const float square = *b * c.beta2 + (g * g) * c.one_minus_beta2;
    // Not a number stays one, as with torch.maximum.
    const float most = square > *third || square != square ? square : *third;
    *a = mean;
    *b = square;
    *third = most;
    return p * c.decay - c.step_size * mean / (__builtin_sqrtf(most) * c.inverse_sqrt_correction2 + c.eps);
  }
  if constexpr (kRule == UpdateRule::kAdagrad) {
    const float sum = *a * c.keep + c.initial + g * g;
    *a = sum;
    return p - c.step_size * g / (__builtin_sqrtf(sum) + c.eps);
  }
  const float square = *a * c.beta2 + c.one_minus_beta2 * g * g;
  *a = square;
  if constexpr (kRule == UpdateRule::kRmspropCentered || kRule == UpdateRule::kRmspropCenteredMomentum) {
    const float mean = *b + c.one_minus_beta2 * (g - *b);
    *b = mean;
    const float variance = square - mean * mean;
    const float centered_root = __builtin_sqrtf(variance < 0 ? 0.0f : variance) + c.eps;
    if constexpr (kRule == UpdateRule::kRmspropCenteredMomentum) {
      const float velocity = *third * c.momentum + g / centered_root;
      *third = velocity;
      return p - c.step_size * velocity;
    }
    return p - c.step_size * g / centered_root;
  }
  const float root = __builtin_sqrtf(square) + c.eps;
  if constexpr (kRule == UpdateRule::kRmspropMomentum) {
    const float velocity = *b * c.momentum + g / root;
    *b = velocity;
    return p - c.step_size * velocity;
  }
  return p - c.step_size * g / root;
}

template <typename Param, UpdateRule kRule>
struct RuleBody {
  static SHARDD_ALWAYS_INLINE void Run(const RuleScalars* scalars, void* param, const float* grad, float* first_state,
                                       float* second_state, float* third_state, int64_t numel) {
    const RuleScalars c = *scalars;
    auto* __restrict p = static_cast<typename Param::Storage*>(param);
    const float* __restrict g = grad;
    float* __restrict a = first_state;
    float* __restrict b = second_state;
    float* __restrict third = third_state;
    SHARDD_NO_ALIAS
    for (int64_t i = 0; i < numel; ++i) {
      float ai = a[i];
      float bi = 0;
      float ti = 0;
      if constexpr (HasSecond(kRule)) bi = b[i];
      if constexpr (HasThird(kRule)) ti = third[i];
      p[i] = Param::Store(UpdateOne<kRule>(c, Param::Load(p[i]), g[i], &ai, &bi, &ti));
      a[i] = ai;
      if constexpr (HasSecond(kRule)) b[i] = bi;
      if constexpr (HasThird(kRule)) third[i] = ti;
    }
  }
};

template <typename Param, UpdateRule kRule>
struct LoggedRuleBody {
  static SHARDD_ALWAYS_INLINE void Run(const RuleScalars* scalars, void* param, const float* grad, float* a, float* b,
                                       float* third, int64_t numel, UpdateLog* log, int64_t first) {
    auto* const p = static_cast<typename Param::Storage*>(param);
    const RuleScalars c = *scalars;
    RunLogged(
        log, first, numel,
        [&](int64_t i, int64_t count) __attribute__((always_inline)) {
          log->Save(0, p + i, count * static_cast<int64_t>(sizeof(*p)));
          log->Save(1, a + i, count * static_cast<int64_t>(sizeof(float)));
          if constexpr (HasSecond(kRule)) log->Save(2, b + i, count * static_cast<int64_t>(sizeof(float)));
          if constexpr (HasThird(kRule)) log->Save(3, third + i, count * static_cast<int64_t>(sizeof(float)));
        },
        [&](int64_t i, int64_t count) __attribute__((always_inline)) {
          RuleBody<Param, kRule>::Run(&c, p + i, grad + i, a + i, HasSecond(kRule) ? b + i : nullptr,
                                      HasThird(kRule) ? third + i : nullptr, count);
        });
  }
};

using RuleFn = void (*)(const RuleScalars*, void*, const float*, float*, float*, float*, int64_t);
using LoggedRuleFn = void (*)(const RuleScalars*, void*, const float*, float*, float*, float*, int64_t, UpdateLog*,
                              int64_t);
struct RuleFns {
  RuleFn plain;
  LoggedRuleFn logged;
};

template <typename Param, UpdateRule kRule>
RuleFns SelectBody() {
  const tensor::Isa isa = tensor::CurrentIsa();
  return {
      tensor::Select<RuleBody<Param, kRule>, const RuleScalars*, void*, const float*, float*, float*, float*, int64_t>(
          isa),
      tensor::Select<LoggedRuleBody<Param, kRule>, const RuleScalars*, void*, const float*, float*, float*, float*,
                     int64_t, UpdateLog*, int64_t>(isa)};
}

template <typename Param>
RuleFns SelectRule(UpdateRule rule) {
  switch (rule) {
    case UpdateRule::kAdagrad:
      return SelectBody<Param, UpdateRule::kAdagrad>();
    case UpdateRule::kRmsprop:
      return SelectBody<Param, UpdateRule::kRmsprop>();
    case UpdateRule::kRmspropMomentum:
      return SelectBody<Param, UpdateRule::kRmspropMomentum>();
    case UpdateRule::kRmspropCentered:
      return SelectBody<Param, UpdateRule::kRmspropCentered>();
    case UpdateRule::kLion:
      return SelectBody<Param, UpdateRule::kLion>();
    case UpdateRule::kRmspropCenteredMomentum:
      return SelectBody<Param, UpdateRule::kRmspropCenteredMomentum>();
    case UpdateRule::kAmsgrad:
      return SelectBody<Param, UpdateRule::kAmsgrad>();
  }
  __builtin_unreachable();
}

RuleFns SelectUpdate(UpdateRule rule, DType dtype) {
  return tensor::WithTrainable(dtype, "update of", [=](auto param) { return SelectRule<decltype(param)>(rule); });
}

}  // namespace

const char* UpdateRuleName(UpdateRule rule) {
  switch (rule) {
    case UpdateRule::kAdagrad:
      return "adagrad";
    case UpdateRule::kRmsprop:
      return "rmsprop";
    case UpdateRule::kRmspropMomentum:
      return "rmsprop with momentum";
    case UpdateRule::kRmspropCentered:
      return "centered rmsprop";
    case UpdateRule::kLion:
      return "lion";
    case UpdateRule::kRmspropCenteredMomentum:
      return "centered rmsprop with momentum";
    case UpdateRule::kAmsgrad:
      return "amsgrad";
  }
  return "unknown rule";
}

int UpdateRuleStates(UpdateRule rule) { return HasThird(rule) ? 3 : HasSecond(rule) ? 2 : 1; }

RuleScalars MakeRuleScalars(const RuleParams& params) {
  const bool adagrad = params.rule == UpdateRule::kAdagrad;
  const bool finds_initial = adagrad && params.step == 1;
  const bool amsgrad = params.rule == UpdateRule::kAmsgrad;
  const auto step = static_cast<double>(params.step);
  const double lr = adagrad   ? params.lr / (1 + (step - 1) * params.lr_decay)
                    : amsgrad ? params.lr / (1 - std::pow(params.beta1, step))
                              : params.lr;
  const bool adds_decay = !amsgrad || params.coupled_decay;
  const bool keeps_all = amsgrad && params.coupled_decay;
  return {static_cast<float>(params.grad_scale),
          adds_decay ? static_cast<float>(params.weight_decay) : 0.0f,
          keeps_all ? 1.0f : static_cast<float>(1 - params.lr * params.weight_decay),
          static_cast<float>(lr),
          static_cast<float>(params.eps),
          static_cast<float>(params.beta1),
          static_cast<float>(1 - params.beta1),
          static_cast<float>(params.beta2),
          static_cast<float>(1 - params.beta2),
          static_cast<float>(params.momentum),
          finds_initial ? 0.0f : 1.0f,
          finds_initial ? static_cast<float>(params.initial) : 0.0f,
          amsgrad ? static_cast<float>(1 / std::sqrt(1 - std::pow(params.beta2, step))) : 0.0f};
}

void RuleUpdateWith(UpdateRule rule, const RuleScalars& scalars, void* p, DType param_dtype, const float* g, float* a,
                    float* b, void* cast_dst, DType cast_dtype, int64_t numel, UpdateLog* log, int64_t first,
                    float* c) {
  if (numel <= 0) return;
  const RuleFns update = SelectUpdate(rule, param_dtype);
  const int64_t bytes = DTypeSizeBytes(param_dtype);
  tensor::UpdateAndCast(p, param_dtype, cast_dst, cast_dtype, numel, [&](int64_t begin, int64_t count) {
    void* const param = static_cast<char*>(p) + begin * bytes;
    float* const second = b == nullptr ? nullptr : b + begin;
    float* const third = c == nullptr ? nullptr : c + begin;
    if (log == nullptr) {
      update.plain(&scalars, param, g + begin, a + begin, second, third, count);
    } else {
      update.logged(&scalars, param, g + begin, a + begin, second, third, count, log, first + begin);
    }
  });
}

}  // namespace shardd
