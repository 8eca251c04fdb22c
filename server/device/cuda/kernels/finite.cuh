#ifndef SHARDD_SERVER_DEVICE_CUDA_KERNELS_FINITE_CUH_
#define SHARDD_SERVER_DEVICE_CUDA_KERNELS_FINITE_CUH_

#include "server/device/cuda/kernels/element.cuh"
#include "server/device/cuda/kernels/range.cuh"

namespace shardd::cuda {

// All bits of the exponent are set.
SHARDD_ALWAYS_INLINE bool IsNonFinite(F32, float x) { return (tensor::BitsOf(x) & 0x7f800000u) == 0x7f800000u; }
SHARDD_ALWAYS_INLINE bool IsNonFinite(Bf16, uint16_t x) { return (x & 0x7f80u) == 0x7f80u; }
SHARDD_ALWAYS_INLINE bool IsNonFinite(F16, uint16_t x) { return (x & 0x7c00u) == 0x7c00u; }
SHARDD_ALWAYS_INLINE bool IsNonFinite(F64, double x) {
  return (__builtin_bit_cast(uint64_t, x) >> 52 & 0x7ffu) == 0x7ffu;
}

template <typename DType>
SHARDD_ALWAYS_INLINE void FiniteRange(const FiniteArgs& args, Thread thread) {
  using Src = typename DType::Storage;
  constexpr int kPack = 16 / static_cast<int>(sizeof(Src));
  const Src* src = static_cast<const Src*>(args.src);
  const auto range = Range<kPack>::Of(src, args.numel);
  const Reader<Src, kPack> reader(src + range.head);
  bool found = false;
  range.ForEach(
      thread, [&](int64_t i) { found |= IsNonFinite(DType{}, src[i]); },
      [&](int64_t k) {
        const Pack<Src, kPack> in = reader.Read(k, range.packs);
        SHARDD_UNROLL
        for (int i = 0; i < kPack; ++i) found |= IsNonFinite(DType{}, in.at[i]);
      });
  if (found) *args.found = 1;  // all threads that find one write the same value
}

SHARDD_ALWAYS_INLINE void FiniteThread(const FiniteArgs& args, Thread thread) {
  WithDType(args.dtype, [&](auto dtype) { FiniteRange<decltype(dtype)>(args, thread); });
}

}  // namespace shardd::cuda

#endif  // SHARDD_SERVER_DEVICE_CUDA_KERNELS_FINITE_CUH_
