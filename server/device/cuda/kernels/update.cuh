#ifndef SHARDD_SERVER_DEVICE_CUDA_KERNELS_UPDATE_CUH_
#define SHARDD_SERVER_DEVICE_CUDA_KERNELS_UPDATE_CUH_

// Code shared by the updates: AdamW and SGD read and write 16 bytes of fp32 at a time.

#include <cmath>

#include "server/device/cuda/kernels/element.cuh"
#include "server/device/cuda/kernels/range.cuh"

namespace shardd::cuda {

inline constexpr int kUpdatePack = 4;
using FloatPack = Pack<float, kUpdatePack>;
using FloatReader = Reader<float, kUpdatePack>;
using FloatWriter = Writer<float, kUpdatePack>;

// The cast copy for the next forward, made of the stored values; to nowhere, or in any dtype.
template <typename Param>
struct CastCopy {
  using Stored = typename Param::Storage;
  void* dst;
  KernelDType dtype;

  template <typename To>
  static SHARDD_ALWAYS_INLINE typename To::Storage Cast(Stored x) {
    if constexpr (kSame<Param, To>) {
      return x;
    } else {
      return To::Store(Param::Load(x));
    }
  }
  SHARDD_ALWAYS_INLINE void Single(int64_t i, Stored x) const {
    if (dst == nullptr) return;
    WithDType(dtype, [&](auto to) {
      using To = decltype(to);
      static_cast<typename To::Storage*>(dst)[i] = Cast<To>(x);
    });
  }
  SHARDD_ALWAYS_INLINE void Write(int64_t head, int64_t pack, const Pack<Stored, kUpdatePack>& values) const {
    if (dst == nullptr) return;
    WithDType(dtype, [&](auto to) {
      using To = decltype(to);
      using Storage = typename To::Storage;
      Pack<Storage, kUpdatePack> out;
      SHARDD_UNROLL
      for (int i = 0; i < kUpdatePack; ++i) out.at[i] = Cast<To>(values.at[i]);
      Writer<Storage, kUpdatePack>(static_cast<Storage*>(dst) + head).Write(pack, out);
    });
  }
};

}  // namespace shardd::cuda

#endif  // SHARDD_SERVER_DEVICE_CUDA_KERNELS_UPDATE_CUH_
