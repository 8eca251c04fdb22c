#ifndef SHARDD_SERVER_DEVICE_CUDA_KERNELS_ELEMENT_CUH_
#define SHARDD_SERVER_DEVICE_CUDA_KERNELS_ELEMENT_CUH_

// Converts one element of each dtype to the type of the arithmetic and back: common/tensor/float_bits.h with the
// differences that a GPU needs. Its arithmetic, also in conversions between fp32 and fp64, makes every NaN the same
// NaN, so NaNs bypass it; and integer units have half the lanes, so fp16 uses the conversion instructions, which keep
// denormals and round as the software does.
//
// Like everything in *.cuh it is also host code: tests run it without a GPU.

#include <cstdint>

#include "common/tensor/float_bits.h"
#include "server/device/cuda/kernels.h"

#if defined(__CUDACC__)
#define SHARDD_UNROLL _Pragma("unroll")
#define SHARDD_UNROLL_8 _Pragma("unroll 8")
#define SHARDD_UNROLL_16 _Pragma("unroll 16")
#else
#define SHARDD_UNROLL
#define SHARDD_UNROLL_8
#define SHARDD_UNROLL_16
#endif

namespace shardd::cuda {

SHARDD_ALWAYS_INLINE bool IsNan(float x) { return x != x; }
SHARDD_ALWAYS_INLINE bool IsNan(double x) { return x != x; }

// fp32 to fp64 and back; NaNs convert as on x86 and ARM: quiet, with their sign and upper payload bits.
SHARDD_ALWAYS_INLINE double Widen(float x) {
  const uint64_t bits = tensor::BitsOf(x);
  const uint64_t nan = (bits & 0x80000000u) << 32 | uint64_t{0x7ff8} << 48 | (bits & 0x7fffffu) << 29;
  return IsNan(x) ? __builtin_bit_cast(double, nan) : static_cast<double>(x);
}
SHARDD_ALWAYS_INLINE float NarrowNan(double x) {
  const uint64_t bits = __builtin_bit_cast(uint64_t, x);
  const uint64_t payload = bits >> 29 & 0x7fffffu;
  return tensor::FloatOf(static_cast<uint32_t>((bits >> 32 & 0x80000000u) | 0x7fc00000u | payload));
}

struct F32 {
  using Storage = float;
  static SHARDD_ALWAYS_INLINE float Load(float x) { return x; }
  static SHARDD_ALWAYS_INLINE float Store(float x) { return x; }
  static SHARDD_ALWAYS_INLINE float Store(double x) { return IsNan(x) ? NarrowNan(x) : static_cast<float>(x); }
};

struct Bf16 {
  using Storage = uint16_t;
  static SHARDD_ALWAYS_INLINE float Load(uint16_t x) { return tensor::Bf16ToFloat(x); }
  static SHARDD_ALWAYS_INLINE uint16_t Store(float x) { return tensor::FloatToBf16(x); }
  static SHARDD_ALWAYS_INLINE uint16_t Store(double x) {
    return tensor::FloatToBf16(IsNan(x) ? NarrowNan(x) : tensor::DoubleToFloatOdd(x));
  }
};

struct F16 {
  using Storage = uint16_t;
  static SHARDD_ALWAYS_INLINE float Load(uint16_t x) {
#if defined(__CUDA_ARCH__)
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x));
    const uint32_t nan = (static_cast<uint32_t>(x) & 0x8000u) << 16 | 0x7f800000u | (x & 0x3ffu) << 13;
    return (x & 0x7fffu) > 0x7c00u ? tensor::FloatOf(nan) : value;
#else
    return tensor::HalfToFloat(x);
#endif
  }
  static SHARDD_ALWAYS_INLINE uint16_t Store(float x) {
#if defined(__CUDA_ARCH__)
    uint16_t half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
    const uint32_t bits = tensor::BitsOf(x);
    const uint32_t nan = (bits >> 16 & 0x8000u) | 0x7e00u | (bits >> 13 & 0x3ffu);
    return IsNan(x) ? static_cast<uint16_t>(nan) : half;
#else
    return tensor::FloatToHalf(x);
#endif
  }
  static SHARDD_ALWAYS_INLINE uint16_t Store(double x) {
    return Store(IsNan(x) ? NarrowNan(x) : tensor::DoubleToFloatOdd(x));
  }
};

struct F64 {
  using Storage = double;
  static SHARDD_ALWAYS_INLINE double Load(double x) { return x; }
  static SHARDD_ALWAYS_INLINE double Store(float x) { return Widen(x); }
  static SHARDD_ALWAYS_INLINE double Store(double x) { return x; }
};

// Calls use(F32{}) or another type. An unexpected dtype does nothing: the launching code has checked it.
template <typename Use>
SHARDD_ALWAYS_INLINE void WithDType(KernelDType dtype, Use use) {
  if (dtype == kFloat32) use(F32{});
  if (dtype == kBFloat16) use(Bf16{});
  if (dtype == kFloat16) use(F16{});
  if (dtype == kFloat64) use(F64{});
}
// Only trainable dtypes.
template <typename Use>
SHARDD_ALWAYS_INLINE void WithTrainable(KernelDType dtype, Use use) {
  if (dtype == kFloat32) use(F32{});
  if (dtype == kBFloat16) use(Bf16{});
  if (dtype == kFloat16) use(F16{});
}

template <typename A, typename B>
inline constexpr bool kSame = false;
template <typename A>
inline constexpr bool kSame<A, A> = true;

}  // namespace shardd::cuda

#endif  // SHARDD_SERVER_DEVICE_CUDA_KERNELS_ELEMENT_CUH_
