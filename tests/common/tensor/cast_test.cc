// Casts against a reference that knows only how many bits a format has: nearest multiple of the quantum, in double.

#include <gtest/gtest.h>

#include <cfenv>
#include <cmath>
#include <limits>

#include "tests/common/tensor/isa_test_util.h"

namespace shardd {
namespace {

struct Format {
  DType dtype;
  int mantissa_bits;
  int min_exponent;  // of a normal number
  int max_exponent;
};
constexpr Format kBf16 = {v1::DTYPE_BFLOAT16, 7, -126, 127};
constexpr Format kFp16 = {v1::DTYPE_FLOAT16, 10, -14, 15};

// The value that `h` stands for.
double Decode(const Format& format, uint16_t h) {
  const int exponent_field = (h & 0x7fff) >> format.mantissa_bits;
  const int mantissa = h & ((1 << format.mantissa_bits) - 1);
  const double sign = (h & 0x8000) != 0 ? -1 : 1;
  if (exponent_field == format.max_exponent * 2 + 1) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * INFINITY;
  }
  const double hidden = exponent_field == 0 ? 0 : 1 << format.mantissa_bits;
  const int exponent = exponent_field == 0 ? format.min_exponent : exponent_field - format.max_exponent;
  return sign * std::ldexp(hidden + mantissa, exponent - format.mantissa_bits);
}

double RoundToFormat(const Format& format, double x) {
  if (!std::isfinite(x) || x == 0) return x;
  const int exponent = std::max(std::ilogb(x), format.min_exponent);
  const double quantum = std::ldexp(1.0, exponent - format.mantissa_bits);
  const double rounded = std::nearbyint(x / quantum) * quantum;  // ties to even: the default rounding mode
  const double limit = std::ldexp(1.0, format.max_exponent + 1);
  return std::fabs(rounded) >= limit ? std::copysign(INFINITY, x) : rounded;
}

void ExpectRoundedFrom(const Format& format, double x, uint16_t got) {
  if (std::isnan(x)) {
    EXPECT_TRUE(std::isnan(Decode(format, got))) << std::hex << got;
    return;
  }
  const double want = RoundToFormat(format, x);
  EXPECT_EQ(Decode(format, got), want) << std::hexfloat << x << " gave 0x" << std::hex << got;
  EXPECT_EQ((got & 0x8000) != 0, std::signbit(x)) << std::hexfloat << x;
}

// fp32 inputs around every value of the 16-bit format: itself, ties, one ulp off the ties; and a sample of all.
std::vector<float> InterestingFloats(const Format& format) {
  std::vector<float> result;
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const double here = Decode(format, static_cast<uint16_t>(h));
    const double next = Decode(format, static_cast<uint16_t>(h + 1));
    result.push_back(static_cast<float>(here));
    if (!std::isfinite(here) || !std::isfinite(next)) continue;
    const float tie = static_cast<float>((here + next) / 2);
    result.insert(result.end(), {tie, std::nextafter(tie, INFINITY), std::nextafter(tie, -INFINITY)});
  }
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += 8191) {
    result.push_back(BitCast<float>(static_cast<uint32_t>(bits)));
  }
  for (uint32_t bits :
       {0x7f800001u, 0x7fffffffu, 0xffc00000u, 0xff800001u, 0x7f800000u, 0xff800000u, 0x7f7fffffu, 0x00000001u,
        0x80000001u, 0x007fffffu, 0x477fefffu, 0x477ff000u, 0x477ff001u, 0x7f7f7fffu, 0x7f7f8000u}) {
    result.push_back(BitCast<float>(bits));
  }
  return result;
}

class CastTest : public IsaTest {};

TEST_P(CastTest, Bf16AndFp16WidenExactly) {
  ASSERT_EQ(std::fegetround(), FE_TONEAREST);
  std::vector<uint16_t> all(0x10000);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  for (const Format& format : {kBf16, kFp16}) {
    const std::vector<float> got = AsFloat(all, format.dtype);
    for (size_t i = 0; i < all.size(); ++i) {
      const double want = Decode(format, all[i]);
      if (std::isnan(want)) {
        EXPECT_TRUE(std::isnan(got[i])) << i;
      } else {
        EXPECT_EQ(static_cast<double>(got[i]), want) << i;
      }
      EXPECT_EQ(std::signbit(got[i]), (i & 0x8000) != 0) << i;
    }
  }
}

TEST_P(CastTest, Fp32NarrowsToNearestEvenKeepingDenormalsAndNan) {
  for (const Format& format : {kBf16, kFp16}) {
    const std::vector<float> inputs = InterestingFloats(format);
    const std::vector<uint16_t> got = As16Bit(inputs, format.dtype);
    for (size_t i = 0; i < inputs.size() && !HasFailure(); ++i) ExpectRoundedFrom(format, inputs[i], got[i]);
  }
}

TEST_P(CastTest, Fp64NarrowsWithOneRounding) {
  for (const Format& format : {kBf16, kFp16}) {
    std::vector<double> inputs;
    for (float x : InterestingFloats(format)) {
      const double d = x;
      // Just beside a tie of the narrow format, where rounding to fp32 first would make it one.
      inputs.insert(inputs.end(), {d, std::nextafter(d, INFINITY), std::nextafter(d, -INFINITY)});
    }
    inputs.insert(inputs.end(), {1e300, -1e300, 1e-300, -1e-300, 3.5e38, 65519.999999, 65520.0});
    std::vector<uint16_t> got(inputs.size());
    Cast(inputs.data(), v1::DTYPE_FLOAT64, got.data(), format.dtype, static_cast<int64_t>(inputs.size()));
    for (size_t i = 0; i < inputs.size() && !HasFailure(); ++i) ExpectRoundedFrom(format, inputs[i], got[i]);
  }
}

TEST_P(CastTest, Fp16OverflowsToInfinityFrom65520) {
  const std::vector<uint16_t> got = As16Bit({65504.0f, 65519.0f, 65520.0f, -65520.0f, 1e30f}, v1::DTYPE_FLOAT16);
  EXPECT_EQ(got, (std::vector<uint16_t>{0x7bff, 0x7bff, 0x7c00, 0xfc00, 0x7c00}));
}

TEST_P(CastTest, Fp64AndFp32ConvertBothWays) {
  const std::vector<double> wide = {1.0 / 3, -2.5, 1e300, 0.0};
  std::vector<float> narrow(4);
  Cast(wide.data(), v1::DTYPE_FLOAT64, narrow.data(), v1::DTYPE_FLOAT32, 4);
  EXPECT_EQ(narrow, (std::vector<float>{static_cast<float>(1.0 / 3), -2.5f, INFINITY, 0.0f}));
  std::vector<double> back(3);
  Cast(narrow.data(), v1::DTYPE_FLOAT32, back.data(), v1::DTYPE_FLOAT64, 3);
  EXPECT_EQ(back, (std::vector<double>{narrow[0], -2.5, INFINITY}));
}

TEST_P(CastTest, Bf16ToFp16GoesThroughTheExactValue) {
  const std::vector<uint16_t> bf16 = As16Bit({1.5f, -3.0f, 1e30f, 1e-30f}, v1::DTYPE_BFLOAT16);
  std::vector<uint16_t> fp16(4);
  Cast(bf16.data(), v1::DTYPE_BFLOAT16, fp16.data(), v1::DTYPE_FLOAT16, 4);
  EXPECT_EQ(fp16, (std::vector<uint16_t>{0x3e00, 0xc200, 0x7c00, 0x0000}));
}

// Large ranges take another path (streamed blocks with a head and a tail): same result, nothing written outside.
TEST_P(CastTest, LargeUnalignedRangesEqualSmallOnesAndStayInBounds) {
  const int64_t numel = 1'100'003;
  const std::vector<float> src = Randoms(numel, 1);
  for (DType to : {v1::DTYPE_BFLOAT16, v1::DTYPE_FLOAT16, v1::DTYPE_FLOAT32, v1::DTYPE_FLOAT64}) {
    const int64_t bytes = DTypeSizeBytes(to);
    for (int64_t offset : {0, 1, 7}) {
      std::vector<char> dst(static_cast<size_t>((numel + 16) * bytes), 0x5a);
      std::vector<char> want = dst;
      char* at = dst.data() + offset * bytes;
      Cast(src.data(), v1::DTYPE_FLOAT32, at, to, numel);
      for (int64_t i = 0; i < numel; i += 1000) {
        Cast(src.data() + i, v1::DTYPE_FLOAT32, want.data() + (offset + i) * bytes, to,
             std::min<int64_t>(1000, numel - i));
      }
      EXPECT_TRUE(dst == want) << DTypeName(to) << " at element offset " << offset;
    }
  }
}

TEST_P(CastTest, CopyBytesCopiesAnySizeAtAnyAlignment) {
  std::vector<char> src(3 << 20);
  for (size_t i = 0; i < src.size(); ++i) src[i] = static_cast<char>(i * 31 + (i >> 8));
  for (int64_t size : {0, 1, 63, 64, 4095, (2 << 20) - 1, 2 << 20, (2 << 20) + 77}) {
    for (int64_t offset : {0, 3, 64}) {
      std::vector<char> dst(src.size() + 256, 0x5a);
      std::vector<char> want = dst;
      std::memcpy(want.data() + offset, src.data() + 5, static_cast<size_t>(size));
      CopyBytes(src.data() + 5, dst.data() + offset, size);
      EXPECT_TRUE(dst == want) << size << " bytes at " << offset;
    }
  }
}

TEST_P(CastTest, EqualDTypesCopyAlsoIntegersBitForBit) {
  const std::vector<int64_t> src = {1, -2, std::numeric_limits<int64_t>::min()};
  std::vector<int64_t> dst(3);
  Cast(src.data(), v1::DTYPE_INT64, dst.data(), v1::DTYPE_INT64, 3);
  EXPECT_EQ(dst, src);
  const uint16_t signalling = 0x7f81;  // a NaN that arithmetic would change
  uint16_t copy = 0;
  Cast(&signalling, v1::DTYPE_BFLOAT16, &copy, v1::DTYPE_BFLOAT16, 1);
  EXPECT_EQ(copy, signalling);
}

TEST(CastDeathTest, CastsThatDoNotExistAbortWithTheDType) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  int32_t src = 0;
  float dst = 0;
  EXPECT_DEATH(Cast(&src, v1::DTYPE_INT32, &dst, v1::DTYPE_FLOAT32, 1), "cast from: dtype 6 is not supported");
}

SHARDD_FOR_EACH_ISA(CastTest);

}  // namespace
}  // namespace shardd
