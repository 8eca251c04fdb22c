#ifndef SHARDD_SERVER_DEVICE_CUDA_KERNELS_SGD_CUH_
#define SHARDD_SERVER_DEVICE_CUDA_KERNELS_SGD_CUH_

#include "server/device/cuda/kernels/update.cuh"

namespace shardd::cuda {

// As common/tensor/update.cc. b: the momentum; read unless this is the first step; ignored without momentum.
template <typename Param>
SHARDD_ALWAYS_INLINE void SgdOne(const SgdArgs& args, float g, typename Param::Storage* p, float* b) {
  const SgdScalars& c = args.scalars;
  const float pi = Param::Load(*p);
  float gi = g * c.grad_scale + c.weight_decay * pi;
  if (args.buf != nullptr) {
    const float bi = args.first_step ? gi : c.momentum * *b + c.one_minus_dampening * gi;
    *b = bi;
    gi = args.nesterov ? gi + c.momentum * bi : bi;
  }
  *p = Param::Store(pi - c.lr * gi);
}

template <typename Param>
SHARDD_ALWAYS_INLINE void SgdRange(const SgdArgs& args, Thread thread) {
  using Stored = typename Param::Storage;
  Stored* p = static_cast<Stored*>(args.p);
  const bool has_momentum = args.buf != nullptr;
  const bool reads_momentum = has_momentum && !args.first_step;
  const CastCopy<Param> copy{args.cast_dst, args.cast_dtype};
  const auto range = Range<kUpdatePack>::Of(p, args.numel);
  const Reader<Stored, kUpdatePack> p_reader(p + range.head);
  const Writer<Stored, kUpdatePack> p_writer(p + range.head);
  const FloatReader g_reader(args.g + range.head);
  const int64_t b_head = has_momentum ? range.head : 0;  // adds nothing to a null pointer
  const FloatReader b_reader(args.buf + b_head);
  const FloatWriter b_writer(args.buf + b_head);
  range.ForEach(
      thread,
      [&](int64_t i) {
        float b = reads_momentum ? args.buf[i] : 0;
        SgdOne<Param>(args, args.g[i], &p[i], &b);
        if (has_momentum) args.buf[i] = b;
        copy.Single(i, p[i]);
      },
      [&](int64_t k) {
        Pack<Stored, kUpdatePack> pk = p_reader.ReadOwn(k);
        const FloatPack gk = g_reader.Read(k, range.packs);
        FloatPack bk = {};
        if (reads_momentum) bk = b_reader.ReadOwn(k);
        SHARDD_UNROLL
        for (int i = 0; i < kUpdatePack; ++i) SgdOne<Param>(args, gk.at[i], &pk.at[i], &bk.at[i]);
        p_writer.Write(k, pk);
        if (has_momentum) b_writer.Write(k, bk);
        copy.Write(range.head, k, pk);
      });
}

SHARDD_ALWAYS_INLINE void SgdThread(const SgdArgs& args, Thread thread) {
  WithTrainable(args.param_dtype, [&](auto param) { SgdRange<decltype(param)>(args, thread); });
}

}  // namespace shardd::cuda

#endif  // SHARDD_SERVER_DEVICE_CUDA_KERNELS_SGD_CUH_
