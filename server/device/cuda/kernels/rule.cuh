#ifndef SHARDD_SERVER_DEVICE_CUDA_KERNELS_RULE_CUH_
#define SHARDD_SERVER_DEVICE_CUDA_KERNELS_RULE_CUH_

#include "server/device/cuda/kernels/update.cuh"

namespace shardd::cuda {

// The same operations in the same order as common/tensor/update_rules.cc; division and square root are correctly
// rounded. Returns the parameter's new value.
template <RuleNumber kRule>
SHARDD_ALWAYS_INLINE float RuleOne(const RuleScalars& c, float p, float grad, float* a, float* b) {
  if constexpr (kRule == kLionRule) {
    const float g = grad * c.grad_scale;
    const float mixed = c.beta1 * *a + c.one_minus_beta1 * g;
    const float sign = mixed > 0 ? 1.0f : mixed < 0 ? -1.0f : mixed;  // zero and NaN are themselves
    *a = c.beta2 * *a + c.one_minus_beta2 * g;
    return p * c.decay - c.step_size * sign;
  } else {
    const float g = grad * c.grad_scale + c.weight_decay * p;
    if constexpr (kRule == kAdagradRule) {
      const float sum = *a * c.keep + c.initial + g * g;
      *a = sum;
      return p - c.step_size * g / (sqrtf(sum) + c.eps);
    } else {
      const float square = *a * c.beta2 + c.one_minus_beta2 * g * g;
      *a = square;
      if constexpr (kRule == kRmspropCenteredRule) {
        const float mean = *b + c.one_minus_beta2 * (g - *b);
        *b = mean;
        const float variance = square - mean * mean;
        return p - c.step_size * g / (sqrtf(variance < 0 ? 0.0f : variance) + c.eps);
      } else {
        const float root = sqrtf(square) + c.eps;
        if constexpr (kRule == kRmspropMomentumRule) {
          const float velocity = *b * c.momentum + g / root;
          *b = velocity;
          return p - c.step_size * velocity;
        } else {
          return p - c.step_size * g / root;
        }
      }
    }
  }
}

template <typename Param, RuleNumber kRule>
SHARDD_ALWAYS_INLINE void RuleRange(const RuleArgs& args, Thread thread) {
  using Stored = typename Param::Storage;
  constexpr bool kHasSecond = kRule == kRmspropMomentumRule || kRule == kRmspropCenteredRule;
  const RuleScalars& c = args.scalars;
  Stored* p = static_cast<Stored*>(args.p);
  const CastCopy<Param> copy{args.cast_dst, args.cast_dtype};
  const auto range = Range<kUpdatePack>::Of(args.a, args.numel);
  const Reader<Stored, kUpdatePack> p_reader(p + range.head);
  const Writer<Stored, kUpdatePack> p_writer(p + range.head);
  const FloatReader g_reader(args.g + range.head), a_reader(args.a + range.head);
  const FloatWriter a_writer(args.a + range.head);
  const int64_t b_head = kHasSecond ? range.head : 0;  // adds nothing to a null pointer
  const FloatReader b_reader(args.b + b_head);
  const FloatWriter b_writer(args.b + b_head);
  range.ForEach(
      thread,
      [&](int64_t i) {
        float b = 0;
        if constexpr (kHasSecond) b = args.b[i];
        p[i] = Param::Store(RuleOne<kRule>(c, Param::Load(p[i]), args.g[i], &args.a[i], &b));
        if constexpr (kHasSecond) args.b[i] = b;
        copy.Single(i, p[i]);
      },
      [&](int64_t k) {
        Pack<Stored, kUpdatePack> pk = p_reader.ReadOwn(k);
        const FloatPack gk = g_reader.Read(k, range.packs);
        FloatPack ak = a_reader.ReadOwn(k);
        FloatPack bk = {};
        if constexpr (kHasSecond) bk = b_reader.ReadOwn(k);
        SHARDD_UNROLL
        for (int i = 0; i < kUpdatePack; ++i) {
          pk.at[i] = Param::Store(RuleOne<kRule>(c, Param::Load(pk.at[i]), gk.at[i], &ak.at[i], &bk.at[i]));
        }
        p_writer.Write(k, pk);
        a_writer.Write(k, ak);
        if constexpr (kHasSecond) b_writer.Write(k, bk);
        copy.Write(range.head, k, pk);
      });
}

SHARDD_ALWAYS_INLINE void RuleThread(const RuleArgs& args, Thread thread) {
  WithTrainable(args.param_dtype, [&](auto param) {
    using Param = decltype(param);
    if (args.rule == kAdagradRule) RuleRange<Param, kAdagradRule>(args, thread);
    if (args.rule == kRmspropRule) RuleRange<Param, kRmspropRule>(args, thread);
    if (args.rule == kRmspropMomentumRule) RuleRange<Param, kRmspropMomentumRule>(args, thread);
    if (args.rule == kRmspropCenteredRule) RuleRange<Param, kRmspropCenteredRule>(args, thread);
    if (args.rule == kLionRule) RuleRange<Param, kLionRule>(args, thread);
  });
}

}  // namespace shardd::cuda

#endif  // SHARDD_SERVER_DEVICE_CUDA_KERNELS_RULE_CUH_
