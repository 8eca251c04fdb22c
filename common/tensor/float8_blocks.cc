#include "common/tensor/float8_blocks.h"

#include <algorithm>

#include "common/tensor/isa_internal.h"
#include "common/tensor/kernels.h"

namespace shardd {
namespace {

using tensor::BitsOf;
using tensor::FloatOf;

constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr uint32_t kSignless = 0x7fffffffu;
// Elements that are converted between casts; whole blocks.
constexpr int64_t kConvertedNumel = tensor::kBlockNumel;
static_assert(kConvertedNumel % kFloat8BlockNumel == 0);

// As FloatToHalf of float_bits.h, with 20 bits to round away and another bias.
SHARDD_ALWAYS_INLINE uint32_t EncodeOne(float x) {
  const uint32_t bits = BitsOf(x);
  const uint32_t magnitude = bits & kSignless;
  const uint32_t normal = (magnitude - (120u << 23) + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
  // The last bit of a float8 denormal, 2^-9, is where the adder rounds next to 2^14.
  const uint32_t denormal = BitsOf(FloatOf(magnitude) + 16384.0f) - BitsOf(16384.0f);
  const uint32_t large = normal > 0x7eu ? 0x7eu : normal;  // 448
  const uint32_t finite = magnitude < (121u << 23) ? denormal : large;
  return (magnitude >= kInfinityBits ? 0x7fu : finite) | ((bits >> 24) & 0x80u);
}

SHARDD_ALWAYS_INLINE float DecodeOne(uint32_t code) {
  const uint32_t magnitude = code & 0x7fu;
  const uint32_t bits = magnitude << 20;
  const uint32_t denormal = BitsOf(FloatOf(bits + (121u << 23)) - FloatOf(121u << 23));
  const uint32_t finite = magnitude < 8u ? denormal : bits + (120u << 23);
  return FloatOf((magnitude == 0x7fu ? 0x7fc00000u : finite) | ((code & 0x80u) << 24));
}

// Writes one block with a scale to its start, for `numel` floats.
struct EncodeBody {
  static SHARDD_ALWAYS_INLINE void Run(const float* src, uint8_t* blocks, int64_t numel) {
    for (int64_t first = 0; first < numel; first += kFloat8BlockNumel) {
      const int64_t count = numel - first < kFloat8BlockNumel ? numel - first : kFloat8BlockNumel;
      const float* __restrict in = src + first;
      uint32_t largest = 0;
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t magnitude = BitsOf(in[i]) & kSignless;
        const uint32_t finite = magnitude < kInfinityBits ? magnitude : 0u;
        largest = finite > largest ? finite : largest;
      }
      // 448 is 1.75 * 2^8: the exponent less 8, and one more where the mantissa is above 1.75.
      const uint32_t exponent = (largest >> 23) + ((largest & 0x7fffffu) > 0x600000u ? 1u : 0u);
      const uint32_t scale = exponent < 9u ? 1u : exponent - 8u;  // 1 to 247
      const float inverse = FloatOf((254u - scale) << 23);
      uint8_t* __restrict out = blocks + 1;
      blocks[0] = static_cast<uint8_t>(scale);
      for (int64_t i = 0; i < count; ++i) out[i] = static_cast<uint8_t>(EncodeOne(in[i] * inverse));
      blocks += 1 + count;
    }
  }
};

// `limit`: the largest number of the dtype that the floats are then rounded to.
struct DecodeBody {
  static SHARDD_ALWAYS_INLINE void Run(const uint8_t* blocks, float* dst, int64_t numel, float limit) {
    for (int64_t first = 0; first < numel; first += kFloat8BlockNumel) {
      const int64_t count = numel - first < kFloat8BlockNumel ? numel - first : kFloat8BlockNumel;
      // No encoder writes 0 and 255: 2^-127 is a denormal float, and 255 makes NaN of the whole block.
      const float scale =
          blocks[0] == 0 ? FloatOf(0x400000u) : FloatOf(blocks[0] == 255 ? 0x7fc00000u : uint32_t{blocks[0]} << 23);
      const uint8_t* __restrict in = blocks + 1;
      float* __restrict out = dst + first;
      for (int64_t i = 0; i < count; ++i) {
        const float x = DecodeOne(in[i]) * scale;
        const float low = x > limit ? limit : x;  // NaN stays
        out[i] = low < -limit ? -limit : low;
      }
      blocks += 1 + count;
    }
  }
};

float LargestOf(DType dtype) {
  if (dtype == v1::DTYPE_FLOAT16) return 65504.0f;
  return FloatOf(dtype == v1::DTYPE_BFLOAT16 ? 0x7f7f0000u : 0x7f7fffffu);
}

void Encode(const float* src, void* blocks, int64_t numel) {
  tensor::Select<EncodeBody, const float*, uint8_t*, int64_t>(tensor::CurrentIsa())(src, static_cast<uint8_t*>(blocks),
                                                                                    numel);
}

void Decode(const void* blocks, float* dst, int64_t numel, DType to) {
  tensor::Select<DecodeBody, const uint8_t*, float*, int64_t, float>(tensor::CurrentIsa())(
      static_cast<const uint8_t*>(blocks), dst, numel, LargestOf(to));
}

// The elements as ranks would read them without blocks, as floats.
void ReadAs(const void* src, DType from, DType to, float* dst, int64_t numel) {
  if (to == v1::DTYPE_FLOAT32 || from == to) {
    Cast(src, from, dst, v1::DTYPE_FLOAT32, numel);
    return;
  }
  alignas(64) uint16_t rounded[kConvertedNumel];
  Cast(src, from, rounded, to, numel);
  Cast(rounded, to, dst, v1::DTYPE_FLOAT32, numel);
}

// Calls convert(first, count) for all elements, whole blocks at a time.
template <typename Convert>
void ForConverted(int64_t numel, Convert&& convert) {
  for (int64_t first = 0; first < numel; first += kConvertedNumel) {
    convert(first, numel - first < kConvertedNumel ? numel - first : kConvertedNumel);
  }
}

void CheckFloat8Blocks(const char* kernel, DType to) {
  if (!HasFloat8Blocks(to)) tensor::UnsupportedDType(kernel, to);
}

}  // namespace

namespace tensor {

uint8_t FloatToFloat8(float x) { return static_cast<uint8_t>(EncodeOne(x)); }
float Float8ToFloat(uint8_t code) { return DecodeOne(code); }

}  // namespace tensor

bool HasFloat8Blocks(DType dtype) {
  return dtype == v1::DTYPE_FLOAT32 || dtype == v1::DTYPE_BFLOAT16 || dtype == v1::DTYPE_FLOAT16;
}

void EncodeFloat8Blocks(const void* src, DType from, DType to, void* blocks, int64_t numel) {
  CheckFloat8Blocks("encode float8 of", to);
  alignas(64) float floats[kConvertedNumel];
  ForConverted(numel, [&](int64_t first, int64_t count) {
    ReadAs(static_cast<const char*>(src) + first * DTypeSizeBytes(from), from, to, floats, count);
    Encode(floats, static_cast<char*>(blocks) + Float8BlocksBytes(first), count);
  });
}

void DecodeFloat8Blocks(const void* blocks, void* dst, DType to, int64_t numel) {
  CheckFloat8Blocks("decode float8 to", to);
  alignas(64) float floats[kConvertedNumel];
  ForConverted(numel, [&](int64_t first, int64_t count) {
    Decode(static_cast<const char*>(blocks) + Float8BlocksBytes(first), floats, count, to);
    Cast(floats, v1::DTYPE_FLOAT32, static_cast<char*>(dst) + first * DTypeSizeBytes(to), to, count);
  });
}

void RoundToFloat8Blocks(const void* src, DType from, void* dst, DType to, int64_t numel) {
  CheckFloat8Blocks("round to float8 of", to);
  alignas(64) float floats[kConvertedNumel];
  uint8_t blocks[Float8BlocksBytes(kConvertedNumel)];
  ForConverted(numel, [&](int64_t first, int64_t count) {
    ReadAs(static_cast<const char*>(src) + first * DTypeSizeBytes(from), from, to, floats, count);
    Encode(floats, blocks, count);
    Decode(blocks, floats, count, to);
    Cast(floats, v1::DTYPE_FLOAT32, static_cast<char*>(dst) + first * DTypeSizeBytes(to), to, count);
  });
}

}  // namespace shardd
