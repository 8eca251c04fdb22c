#ifndef SHARDD_COMMON_TENSOR_FLOAT_BITS_H_
#define SHARDD_COMMON_TENSOR_FLOAT_BITS_H_

// Converts one element of each floating dtype to fp32 (or fp64) and back, in integer arithmetic that compilers
// vectorise. Software on every machine, because the bf16 instruction flushes denormals: equal bits everywhere make
// shard boundaries and machine types invisible. All round to nearest, ties to even; a NaN stays a NaN of the same sign
// (made quiet where it is narrowed, with its upper payload bits).

#include <cstdint>

#if defined(__CUDACC__)  // kernels of server/device/cuda share this code, and so the bits
#define SHARDD_ALWAYS_INLINE inline __attribute__((always_inline)) __host__ __device__
#else
#define SHARDD_ALWAYS_INLINE inline __attribute__((always_inline))
#endif

namespace shardd::tensor {

SHARDD_ALWAYS_INLINE uint32_t BitsOf(float x) { return __builtin_bit_cast(uint32_t, x); }
SHARDD_ALWAYS_INLINE float FloatOf(uint32_t bits) { return __builtin_bit_cast(float, bits); }

SHARDD_ALWAYS_INLINE float Bf16ToFloat(uint16_t h) { return FloatOf(static_cast<uint32_t>(h) << 16); }

SHARDD_ALWAYS_INLINE uint16_t FloatToBf16(float x) {
  const uint32_t bits = BitsOf(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

SHARDD_ALWAYS_INLINE float HalfToFloat(uint16_t h) {
  const uint32_t sign = (static_cast<uint32_t>(h) & 0x8000u) << 16;
  const uint32_t magnitude = h & 0x7fffu;
  const uint32_t bits = magnitude << 13;
  // Rebias the exponent; that of infinity and NaN twice, which makes it the exponent of fp32's.
  const uint32_t normal = bits + (magnitude >= 0x7c00u ? 224u << 23 : 112u << 23);
  // A denormal gets the smallest normal exponent, and with it a leading one too many. No operand is an fp32 denormal,
  // which take some machines a hundred cycles.
  const uint32_t denormal = BitsOf(FloatOf(bits + (113u << 23)) - FloatOf(113u << 23));
  return FloatOf((magnitude < 0x400u ? denormal : normal) | sign);
}

SHARDD_ALWAYS_INLINE uint16_t FloatToHalf(float x) {
  const uint32_t bits = BitsOf(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Normal results, including those that round up to infinity: rebias, then round away 13 bits.
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Denormal results: adding 0.5 puts their last bit where the adder rounds; subtract what it adds above.
  const uint32_t denormal = BitsOf(FloatOf(magnitude) + 0.5f) - BitsOf(0.5f);
  const uint32_t finite = magnitude < (113u << 23) ? denormal : normal;
  const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  const uint32_t special = magnitude > 0x7f800000u ? nan : 0x7c00u;
  // 2^16 and above is infinity; below, rounding decides.
  return static_cast<uint16_t>((magnitude >= (143u << 23) ? special : finite) | sign);
}

// Rounds to odd: an inexact result gets a last bit of one, so that a second rounding to a narrower type gives the
// result of a single rounding.
SHARDD_ALWAYS_INLINE float DoubleToFloatOdd(double x) {
  const float nearest = static_cast<float>(x);
  const double back = nearest;
  if (back == x || x != x) return nearest;
  uint32_t bits = BitsOf(nearest);
  const double magnitude = x < 0 ? -x : x;
  const double back_magnitude = back < 0 ? -back : back;
  if (back_magnitude > magnitude) bits -= 1;  // truncate first: towards zero is one less in either sign
  return FloatOf(bits | 1u);
}

// Per dtype: the type in a buffer, and how an element is read into and written from the type of the arithmetic.
struct Float32 {
  using Storage = float;
  static SHARDD_ALWAYS_INLINE float Load(float x) { return x; }
  static SHARDD_ALWAYS_INLINE float Store(float x) { return x; }
  static SHARDD_ALWAYS_INLINE float Store(double x) { return static_cast<float>(x); }
};
struct BFloat16 {
  using Storage = uint16_t;
  static SHARDD_ALWAYS_INLINE float Load(uint16_t x) { return Bf16ToFloat(x); }
  static SHARDD_ALWAYS_INLINE uint16_t Store(float x) { return FloatToBf16(x); }
  static SHARDD_ALWAYS_INLINE uint16_t Store(double x) { return FloatToBf16(DoubleToFloatOdd(x)); }
};
struct Float16 {
  using Storage = uint16_t;
  static SHARDD_ALWAYS_INLINE float Load(uint16_t x) { return HalfToFloat(x); }
  static SHARDD_ALWAYS_INLINE uint16_t Store(float x) { return FloatToHalf(x); }
  static SHARDD_ALWAYS_INLINE uint16_t Store(double x) { return FloatToHalf(DoubleToFloatOdd(x)); }
};
struct Float64 {
  using Storage = double;
  static SHARDD_ALWAYS_INLINE double Load(double x) { return x; }
  static SHARDD_ALWAYS_INLINE double Store(float x) { return x; }
  static SHARDD_ALWAYS_INLINE double Store(double x) { return x; }
};

}  // namespace shardd::tensor

#endif  // SHARDD_COMMON_TENSOR_FLOAT_BITS_H_
