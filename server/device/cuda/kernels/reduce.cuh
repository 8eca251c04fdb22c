#ifndef SHARDD_SERVER_DEVICE_CUDA_KERNELS_REDUCE_CUH_
#define SHARDD_SERVER_DEVICE_CUDA_KERNELS_REDUCE_CUH_

#include "server/device/cuda/kernels/element.cuh"
#include "server/device/cuda/kernels/range.cuh"

namespace shardd::cuda {

struct NoRound {
  static SHARDD_ALWAYS_INLINE float Round(float x) { return x; }
};
template <typename To>
struct RoundTo {
  static SHARDD_ALWAYS_INLINE float Round(float x) { return To::Load(To::Store(x)); }
};

SHARDD_ALWAYS_INLINE float Rounded(KernelDType dtype, float x) {
  if (dtype == kBFloat16) return RoundTo<Bf16>::Round(x);
  return dtype == kFloat16 ? RoundTo<F16>::Round(x) : x;
}

// Finishes a sum; `old` is the value of dst.
SHARDD_ALWAYS_INLINE float FinishSum(const ReduceArgs& args, KernelDType reduce_dtype, float sum, float old) {
  const float result = Rounded(args.keep, Rounded(reduce_dtype, sum * args.scale));
  return args.accumulate ? Rounded(args.keep, old + result) : result;
}

template <typename From, typename Rounding>
SHARDD_ALWAYS_INLINE void ReduceRange(const ReduceArgs& args, Thread thread) {
  using Src = typename From::Storage;
  constexpr int kPack = 16 / static_cast<int>(sizeof(Src));
  constexpr int kAtOnce = sizeof(Src) == 4 ? 4 : 2;  // sources with loads in flight together
  const KernelDType reduce_dtype = args.reduce_dtype == kNoDType ? args.source_dtype : args.reduce_dtype;
  const auto at = [&args](int k) { return static_cast<const Src*>(args.sources[k]); };
  const auto range = Range<kPack>::Of(args.dst, args.numel);
  const Reader<float, kPack> old_reader(args.dst + range.head);
  const Writer<float, kPack> writer(args.dst + range.head);
  range.ForEach(
      thread,
      [&](int64_t i) {
        float sum = Rounding::Round(From::Load(at(0)[i]));
        for (int k = 1; k < args.source_count; ++k) sum += Rounding::Round(From::Load(at(k)[i]));
        args.dst[i] = FinishSum(args, reduce_dtype, sum, args.accumulate ? args.dst[i] : 0);
      },
      [&](int64_t pack) {
        Pack<float, kPack> sum;
        for (int first = 0; first < args.source_count; first += kAtOnce) {
          Pack<Src, kPack> in[kAtOnce];
          SHARDD_UNROLL
          for (int j = 0; j < kAtOnce; ++j) {
            if (first + j < args.source_count) {
              in[j] = Reader<Src, kPack>(at(first + j) + range.head).Read(pack, range.packs);
            }
          }
          SHARDD_UNROLL
          for (int j = 0; j < kAtOnce; ++j) {
            if (first + j >= args.source_count) break;
            SHARDD_UNROLL
            for (int i = 0; i < kPack; ++i) {
              const float x = Rounding::Round(From::Load(in[j].at[i]));
              sum.at[i] = j == 0 && first == 0 ? x : sum.at[i] + x;
            }
          }
        }
        Pack<float, kPack> old = {};
        if (args.accumulate) old = old_reader.ReadOwn(pack);
        SHARDD_UNROLL
        for (int i = 0; i < kPack; ++i) sum.at[i] = FinishSum(args, reduce_dtype, sum.at[i], old.at[i]);
        writer.Write(pack, sum);
      });
}

SHARDD_ALWAYS_INLINE void ReduceThread(const ReduceArgs& args, Thread thread) {
  WithTrainable(args.source_dtype, [&](auto from) {
    using From = decltype(from);
    // Rounding to a dtype that the source already fits changes nothing.
    if (args.reduce_dtype == kBFloat16 && !kSame<From, Bf16>) {
      ReduceRange<From, RoundTo<Bf16>>(args, thread);
    } else if (args.reduce_dtype == kFloat16 && !kSame<From, F16>) {
      ReduceRange<From, RoundTo<F16>>(args, thread);
    } else {
      ReduceRange<From, NoRound>(args, thread);
    }
  });
}

}  // namespace shardd::cuda

#endif  // SHARDD_SERVER_DEVICE_CUDA_KERNELS_REDUCE_CUH_
