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

using tensor::Select;
using tensor::UpdateAndCast;

template <typename Param>
struct AdamWBody {
  static SHARDD_ALWAYS_INLINE void Run(const AdamWScalars* scalars, void* param, const float* grad, float* exp_avg,
                                       float* exp_avg_sq, int64_t numel) {
    const AdamWScalars c = *scalars;
    auto* __restrict p = static_cast<typename Param::Storage*>(param);
    const float* __restrict g = grad;
    float* __restrict m = exp_avg;
    float* __restrict v = exp_avg_sq;
    SHARDD_NO_ALIAS
    for (int64_t i = 0; i < numel; ++i) {
      const float old = Param::Load(p[i]);
      const float gi = g[i] * c.grad_scale + c.coupled * old;
      const float pi = old * c.decay;
      const float mi = m[i] + c.one_minus_beta1 * (gi - m[i]);
      const float vi = v[i] * c.beta2 + (gi * gi) * c.one_minus_beta2;
      const float denominator = __builtin_sqrtf(vi) * c.inverse_sqrt_correction2 + c.eps;
      m[i] = mi;
      v[i] = vi;
      p[i] = Param::Store(pi - c.step_size * mi / denominator);
    }
  }
};

enum class Momentum { kNone, kFirst, kLater };

template <typename Param, Momentum kMomentum, bool kNesterov>
struct SgdBody {
  static SHARDD_ALWAYS_INLINE void Run(const SgdScalars* scalars, void* param, const float* grad, float* buffer,
                                       int64_t numel) {
    const SgdScalars c = *scalars;
    auto* __restrict p = static_cast<typename Param::Storage*>(param);
    const float* __restrict g = grad;
    float* __restrict b = buffer;
    SHARDD_NO_ALIAS
    for (int64_t i = 0; i < numel; ++i) {
      const float pi = Param::Load(p[i]);
      float gi = g[i] * c.grad_scale + c.weight_decay * pi;
      if constexpr (kMomentum != Momentum::kNone) {
        float bi = gi;
        if constexpr (kMomentum == Momentum::kLater) bi = c.momentum * b[i] + c.one_minus_dampening * gi;
        b[i] = bi;
        gi = kNesterov ? gi + c.momentum * bi : bi;
      }
      p[i] = Param::Store(pi - c.lr * gi);
    }
  }
};

template <typename Param>
struct LoggedAdamWBody {
  static SHARDD_ALWAYS_INLINE void Run(const AdamWScalars* scalars, void* param, const float* grad, float* exp_avg,
                                       float* exp_avg_sq, int64_t numel, UpdateLog* log, int64_t first) {
    auto* const p = static_cast<typename Param::Storage*>(param);
    const AdamWScalars c = *scalars;  // stays in registers, whatever the log's fences say of memory
    RunLogged(
        log, first, numel,
        [&](int64_t i, int64_t count) __attribute__((always_inline)) {
          log->Save(0, p + i, count * static_cast<int64_t>(sizeof(*p)));
          log->Save(1, exp_avg + i, count * static_cast<int64_t>(sizeof(float)));
          log->Save(2, exp_avg_sq + i, count * static_cast<int64_t>(sizeof(float)));
        },
        [&](int64_t i, int64_t count) __attribute__((always_inline)) {
          AdamWBody<Param>::Run(&c, p + i, grad + i, exp_avg + i, exp_avg_sq + i, count);
        });
  }
};

template <typename Param, Momentum kMomentum, bool kNesterov>
struct LoggedSgdBody {
  static SHARDD_ALWAYS_INLINE void Run(const SgdScalars* scalars, void* param, const float* grad, float* buffer,
                                       int64_t numel, UpdateLog* log, int64_t first) {
    constexpr bool kHasBuffer = kMomentum != Momentum::kNone;
    auto* const p = static_cast<typename Param::Storage*>(param);
    const SgdScalars c = *scalars;
    RunLogged(
        log, first, numel,
        [&](int64_t i, int64_t count) __attribute__((always_inline)) {
          log->Save(0, p + i, count * static_cast<int64_t>(sizeof(*p)));
          if constexpr (kHasBuffer) log->Save(1, buffer + i, count * static_cast<int64_t>(sizeof(float)));
        },
        [&](int64_t i, int64_t count) __attribute__((always_inline)) {
          SgdBody<Param, kMomentum, kNesterov>::Run(&c, p + i, grad + i, kHasBuffer ? buffer + i : nullptr, count);
        });
  }
};

using AdamWFn = void (*)(const AdamWScalars*, void*, const float*, float*, float*, int64_t);
using LoggedAdamWFn = void (*)(const AdamWScalars*, void*, const float*, float*, float*, int64_t, UpdateLog*, int64_t);
using SgdFn = void (*)(const SgdScalars*, void*, const float*, float*, int64_t);
using LoggedSgdFn = void (*)(const SgdScalars*, void*, const float*, float*, int64_t, UpdateLog*, int64_t);

// What a dtype, momentum and nesterov choose: a kernel, and the one that logs.
struct AdamWFns {
  AdamWFn plain;
  LoggedAdamWFn logged;
};
struct SgdFns {
  SgdFn plain;
  LoggedSgdFn logged;
};

template <typename Param>
AdamWFns SelectAdamWOf() {
  const tensor::Isa isa = tensor::CurrentIsa();
  return {Select<AdamWBody<Param>, const AdamWScalars*, void*, const float*, float*, float*, int64_t>(isa),
          Select<LoggedAdamWBody<Param>, const AdamWScalars*, void*, const float*, float*, float*, int64_t, UpdateLog*,
                 int64_t>(isa)};
}

AdamWFns SelectAdamW(DType dtype) {
  return tensor::WithTrainable(dtype, "adamw of", [](auto param) { return SelectAdamWOf<decltype(param)>(); });
}

template <typename Param, Momentum kMomentum, bool kNesterov>
SgdFns SelectSgdBody() {
  const tensor::Isa isa = tensor::CurrentIsa();
  return {Select<SgdBody<Param, kMomentum, kNesterov>, const SgdScalars*, void*, const float*, float*, int64_t>(isa),
          Select<LoggedSgdBody<Param, kMomentum, kNesterov>, const SgdScalars*, void*, const float*, float*, int64_t,
                 UpdateLog*, int64_t>(isa)};
}

template <typename Param>
SgdFns SelectSgdOf(Momentum momentum, bool nesterov) {
  if (momentum == Momentum::kNone) return SelectSgdBody<Param, Momentum::kNone, false>();
  if (momentum == Momentum::kFirst) {
    return nesterov ? SelectSgdBody<Param, Momentum::kFirst, true>() : SelectSgdBody<Param, Momentum::kFirst, false>();
  }
  return nesterov ? SelectSgdBody<Param, Momentum::kLater, true>() : SelectSgdBody<Param, Momentum::kLater, false>();
}

SgdFns SelectSgd(DType dtype, Momentum momentum, bool nesterov) {
  return tensor::WithTrainable(dtype, "sgd of",
                               [=](auto param) { return SelectSgdOf<decltype(param)>(momentum, nesterov); });
}

}  // namespace

AdamWScalars MakeAdamWScalars(const AdamWParams& params) {
  const double correction1 = 1 - std::pow(params.beta1, static_cast<double>(params.step));
  const double correction2 = 1 - std::pow(params.beta2, static_cast<double>(params.step));
  const double decay = params.coupled_decay ? 0 : params.lr * params.weight_decay;
  return {static_cast<float>(params.grad_scale),
          static_cast<float>(params.coupled_decay ? params.weight_decay : 0),
          static_cast<float>(1 - decay),
          static_cast<float>(1 - params.beta1),
          static_cast<float>(params.beta2),
          static_cast<float>(1 - params.beta2),
          static_cast<float>(params.lr / correction1),
          static_cast<float>(1 / std::sqrt(correction2)),
          static_cast<float>(params.eps)};
}

SgdScalars MakeSgdScalars(const SgdParams& params) {
  return {static_cast<float>(params.grad_scale), static_cast<float>(params.weight_decay),
          static_cast<float>(params.momentum), static_cast<float>(1 - params.dampening), static_cast<float>(params.lr)};
}

void AdamWUpdate(const AdamWParams& params, void* p, DType param_dtype, const float* g, float* m, float* v,
                 void* cast_dst, DType cast_dtype, int64_t numel) {
  AdamWUpdateWith(MakeAdamWScalars(params), p, param_dtype, g, m, v, cast_dst, cast_dtype, numel);
}

void AdamWUpdateWith(const AdamWScalars& scalars, void* p, DType param_dtype, const float* g, float* m, float* v,
                     void* cast_dst, DType cast_dtype, int64_t numel, UpdateLog* log, int64_t first) {
  if (numel <= 0) return;
  const AdamWFns update = SelectAdamW(param_dtype);
  const int64_t bytes = DTypeSizeBytes(param_dtype);
  UpdateAndCast(p, param_dtype, cast_dst, cast_dtype, numel, [&](int64_t begin, int64_t count) {
    void* const param = static_cast<char*>(p) + begin * bytes;
    if (log == nullptr) {
      update.plain(&scalars, param, g + begin, m + begin, v + begin, count);
    } else {
      update.logged(&scalars, param, g + begin, m + begin, v + begin, count, log, first + begin);
    }
  });
}

void SgdUpdate(const SgdParams& params, void* p, DType param_dtype, const float* g, float* buf, void* cast_dst,
               DType cast_dtype, int64_t numel) {
  SgdUpdateWith(MakeSgdScalars(params), params.nesterov, params.first_step, p, param_dtype, g, buf, cast_dst,
                cast_dtype, numel);
}

void SgdUpdateWith(const SgdScalars& scalars, bool nesterov, bool first_step, void* p, DType param_dtype,
                   const float* g, float* buf, void* cast_dst, DType cast_dtype, int64_t numel, UpdateLog* log,
                   int64_t first) {
  if (numel <= 0) return;
  const Momentum momentum = buf == nullptr ? Momentum::kNone : (first_step ? Momentum::kFirst : Momentum::kLater);
  const SgdFns update = SelectSgd(param_dtype, momentum, nesterov);
  const int64_t bytes = DTypeSizeBytes(param_dtype);
  UpdateAndCast(p, param_dtype, cast_dst, cast_dtype, numel, [&](int64_t begin, int64_t count) {
    void* const param = static_cast<char*>(p) + begin * bytes;
    float* const buffer = buf == nullptr ? nullptr : buf + begin;
    if (log == nullptr) {
      update.plain(&scalars, param, g + begin, buffer, count);
    } else {
      update.logged(&scalars, param, g + begin, buffer, count, log, first + begin);
    }
  });
}

}  // namespace shardd
