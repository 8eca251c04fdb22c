#ifndef SHARDD_SERVER_DEVICE_CUDA_KERNELS_RULE_CUH_
#define SHARDD_SERVER_DEVICE_CUDA_KERNELS_RULE_CUH_

#include "server/device/cuda/kernels/update.cuh"

namespace shardd::cuda {

// The same operations in the same order as common/tensor/update_rules.cc; division and square root are correctly
// rounded. Returns the parameter's new value.
// The rule is a branch for each element, which all threads take alike: a range for each rule would take more registers
// than four blocks on a multiprocessor have.
SHARDD_ALWAYS_INLINE float RuleOne(RuleNumber rule, const RuleScalars& c, float p, float grad, float* a, float* b) {
  if (rule == kLionRule) {
    const float g = grad * c.grad_scale;
    const float mixed = c.beta1 * *a + c.one_minus_beta1 * g;
    const float sign = mixed > 0 ? 1.0f : mixed < 0 ? -1.0f : mixed == 0 ? 0.0f : mixed;  // NaN is itself
    *a = c.beta2 * *a + c.one_minus_beta2 * g;
    return p * c.decay - c.step_size * sign;
  }
  const float g = grad * c.grad_scale + c.weight_decay * p;
  if (rule == kAdagradRule) {
    const float sum = *a * c.keep + c.initial + g * g;
    *a = sum;
    return p - c.step_size * g / (sqrtf(sum) + c.eps);
  }
  const float square = *a * c.beta2 + c.one_minus_beta2 * g * g;
  *a = square;
  float under_root = square;
  if (rule == kRmspropCenteredRule) {
    const float mean = *b + c.one_minus_beta2 * (g - *b);
    *b = mean;
    const float variance = square - mean * mean;
    under_root = variance < 0 ? 0.0f : variance;
  }
  const float root = sqrtf(under_root) + c.eps;
  if (rule == kRmspropMomentumRule) {
    const float velocity = *b * c.momentum + g / root;
    *b = velocity;
    return p - c.step_size * velocity;
  }
  return p - c.step_size * g / root;
}

template <typename Param>
SHARDD_ALWAYS_INLINE void RuleRange(const RuleArgs& args, Thread thread) {
  using Stored = typename Param::Storage;
  const bool has_second = args.b != nullptr;
  Stored* p = static_cast<Stored*>(args.p);
  const CastCopy<Param> copy{args.cast_dst, args.cast_dtype};
  const auto range = Range<kUpdatePack>::Of(args.a, args.numel);
  const Reader<Stored, kUpdatePack> p_reader(p + range.head);
  const Writer<Stored, kUpdatePack> p_writer(p + range.head);
  const FloatReader g_reader(args.g + range.head), a_reader(args.a + range.head);
  const FloatWriter a_writer(args.a + range.head);
  const int64_t b_head = has_second ? range.head : 0;  // adds nothing to a null pointer
  const FloatReader b_reader(args.b + b_head);
  const FloatWriter b_writer(args.b + b_head);
  range.ForEach(
      thread,
      [&](int64_t i) {
        float b = has_second ? args.b[i] : 0;
        p[i] = Param::Store(RuleOne(args.rule, args.scalars, Param::Load(p[i]), args.g[i], &args.a[i], &b));
        if (has_second) args.b[i] = b;
        copy.Single(i, p[i]);
      },
      [&](int64_t k) {
        Pack<Stored, kUpdatePack> pk = p_reader.ReadOwn(k);
        const FloatPack gk = g_reader.Read(k, range.packs);
        FloatPack ak = a_reader.ReadOwn(k);
        FloatPack bk = {};
        if (has_second) bk = b_reader.ReadOwn(k);
        SHARDD_UNROLL
        for (int i = 0; i < kUpdatePack; ++i) {
          pk.at[i] =
              Param::Store(RuleOne(args.rule, args.scalars, Param::Load(pk.at[i]), gk.at[i], &ak.at[i], &bk.at[i]));
        }
        p_writer.Write(k, pk);
        a_writer.Write(k, ak);
        if (has_second) b_writer.Write(k, bk);
        copy.Write(range.head, k, pk);
      });
}

SHARDD_ALWAYS_INLINE void RuleThread(const RuleArgs& args, Thread thread) {
  WithTrainable(args.param_dtype, [&](auto param) { RuleRange<decltype(param)>(args, thread); });
}

}  // namespace shardd::cuda

#endif  // SHARDD_SERVER_DEVICE_CUDA_KERNELS_RULE_CUH_
