#ifndef SHARDD_SERVER_DEVICE_CUDA_KERNELS_ADAMW_CUH_
#define SHARDD_SERVER_DEVICE_CUDA_KERNELS_ADAMW_CUH_

#include "server/device/cuda/kernels/update.cuh"

namespace shardd::cuda {

// The same operations in the same order as common/tensor/update.cc; division and square root are correctly rounded.
template <typename Param>
SHARDD_ALWAYS_INLINE void AdamWOne(const AdamWScalars& c, float g, typename Param::Storage* p, float* m, float* v) {
  const float old = Param::Load(*p);
  const float gi = g * c.grad_scale + c.coupled * old;
  const float pi = old * c.decay;
  const float mi = *m + c.one_minus_beta1 * (gi - *m);
  const float vi = *v * c.beta2 + (gi * gi) * c.one_minus_beta2;
  const float denominator = sqrtf(vi) * c.inverse_sqrt_correction2 + c.eps;
  *m = mi;
  *v = vi;
  *p = Param::Store(pi - c.step_size * mi / denominator);
}

template <typename Param>
SHARDD_ALWAYS_INLINE void AdamWRange(const AdamWArgs& args, Thread thread) {
  using Stored = typename Param::Storage;
  Stored* p = static_cast<Stored*>(args.p);
  const CastCopy<Param> copy{args.cast_dst, args.cast_dtype};
  const auto range = Range<kUpdatePack>::Of(args.m, args.numel);
  const Reader<Stored, kUpdatePack> p_reader(p + range.head);
  const FloatReader g_reader(args.g + range.head), m_reader(args.m + range.head), v_reader(args.v + range.head);
  const Writer<Stored, kUpdatePack> p_writer(p + range.head);
  const FloatWriter m_writer(args.m + range.head), v_writer(args.v + range.head);
  range.ForEach(
      thread,
      [&](int64_t i) {
        AdamWOne<Param>(args.scalars, args.g[i], &p[i], &args.m[i], &args.v[i]);
        copy.Single(i, p[i]);
      },
      [&](int64_t k) {
        Pack<Stored, kUpdatePack> pk = p_reader.ReadOwn(k);
        const FloatPack gk = g_reader.Read(k, range.packs);
        FloatPack mk = m_reader.ReadOwn(k);
        FloatPack vk = v_reader.ReadOwn(k);
        SHARDD_UNROLL
        for (int i = 0; i < kUpdatePack; ++i) {
          AdamWOne<Param>(args.scalars, gk.at[i], &pk.at[i], &mk.at[i], &vk.at[i]);
        }
        p_writer.Write(k, pk);
        m_writer.Write(k, mk);
        v_writer.Write(k, vk);
        copy.Write(range.head, k, pk);
      });
}

SHARDD_ALWAYS_INLINE void AdamWThread(const AdamWArgs& args, Thread thread) {
  WithTrainable(args.param_dtype, [&](auto param) { AdamWRange<decltype(param)>(args, thread); });
}

}  // namespace shardd::cuda

#endif  // SHARDD_SERVER_DEVICE_CUDA_KERNELS_ADAMW_CUH_
