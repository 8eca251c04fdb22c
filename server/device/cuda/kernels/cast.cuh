#ifndef SHARDD_SERVER_DEVICE_CUDA_KERNELS_CAST_CUH_
#define SHARDD_SERVER_DEVICE_CUDA_KERNELS_CAST_CUH_

#include "server/device/cuda/kernels/element.cuh"
#include "server/device/cuda/kernels/range.cuh"

namespace shardd::cuda {

template <typename From, typename To>
SHARDD_ALWAYS_INLINE typename To::Storage CastOne(typename From::Storage x, float scale, bool scaled) {
  if (scaled) return To::Store(From::Load(x) * scale);
  if constexpr (kSame<From, To>) {
    return x;  // a signalling NaN stays one
  } else {
    return To::Store(From::Load(x));
  }
}

template <typename From, typename To>
SHARDD_ALWAYS_INLINE void CastRange(const CastArgs& args, Thread thread) {
  using Src = typename From::Storage;
  using Dst = typename To::Storage;
  // A pack has 16 written bytes, so that a warp's stores are one range: if a thread writes two such pieces, each store
  // of the warp has gaps, which costs a tenth of the bandwidth. At least 8 read bytes.
  constexpr int kWritten = 16 / static_cast<int>(sizeof(Dst));
  constexpr int kRead = 8 / static_cast<int>(sizeof(Src));
  constexpr int kPack = kWritten > kRead ? kWritten : kRead;
  const Src* src = static_cast<const Src*>(args.src);
  Dst* dst = static_cast<Dst*>(args.dst);
  const float scale = args.scale;
  const bool scaled = scale != 1;
  const auto range = Range<kPack>::Of(dst, args.numel);
  const Reader<Src, kPack> reader(src + range.head);
  const Writer<Dst, kPack> writer(dst + range.head);
  range.ForEach(
      thread, [=](int64_t i) { dst[i] = CastOne<From, To>(src[i], scale, scaled); },
      [=](int64_t k) {
        const Pack<Src, kPack> in = reader.Read(k, range.packs);
        Pack<Dst, kPack> out;
        SHARDD_UNROLL
        for (int i = 0; i < kPack; ++i) out.at[i] = CastOne<From, To>(in.at[i], scale, scaled);
        writer.Write(k, out);
      });
}

SHARDD_ALWAYS_INLINE void CastThread(const CastArgs& args, Thread thread) {
  WithDType(args.from, [&](auto from) {
    WithDType(args.to, [&](auto to) { CastRange<decltype(from), decltype(to)>(args, thread); });
  });
}

}  // namespace shardd::cuda

#endif  // SHARDD_SERVER_DEVICE_CUDA_KERNELS_CAST_CUH_
