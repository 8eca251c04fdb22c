// Float8 against a reference that knows only how many bits the format has.

#include "common/tensor/float8_blocks.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

#include "tests/common/tensor/isa_test_util.h"
#include "tests/testing/float8_reference.h"

namespace shardd {
namespace {

using tensor::Float8ToFloat;
using tensor::FloatToFloat8;
using testing::NearestFloat8;
using testing::RoundToFloat8;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// The value that a code stands for.
double ValueOf(int code) {
  const int exponent = code >> 3 & 15;
  const int mantissa = code & 7;
  const double sign = (code & 0x80) != 0 ? -1 : 1;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<double>::quiet_NaN();
  return sign * std::ldexp((exponent > 0 ? 8 : 0) + mantissa, std::max(exponent, 1) - 7 - 3);
}

TEST(Float8, All256CodesAreDecodedExactlyAndEncodedBack) {
  for (int code = 0; code < 256; ++code) {
    const float got = Float8ToFloat(static_cast<uint8_t>(code));
    if (std::isnan(ValueOf(code))) {
      EXPECT_TRUE(std::isnan(got)) << code;
    } else {
      EXPECT_EQ(got, ValueOf(code)) << code;
    }
    EXPECT_EQ(std::signbit(got), code >= 128) << code;
    EXPECT_EQ(FloatToFloat8(got), code);
  }
}

TEST(Float8, FloatsAreRoundedToNearestTiesToEven) {
  std::vector<float> inputs = {0.0f, -0.0f, 448, 448.1f, 463.9f, 464, 465, 1e9f, 3.4e38f, 1e-45f, 1e-40f};
  for (int code = 0; code < 0x7e; ++code) {
    const auto tie = static_cast<float>((ValueOf(code) + ValueOf(code + 1)) / 2);
    for (const float x : {tie, std::nextafter(tie, kInfinity), std::nextafter(tie, 0.0f)}) inputs.push_back(x);
  }
  for (uint64_t bits = 0; bits < (uint64_t{1} << 31); bits += 8191) {
    inputs.push_back(BitCast<float>(static_cast<uint32_t>(bits)));
  }
  for (const float positive : inputs) {
    for (const float x : {positive, -positive}) {
      const uint8_t code = FloatToFloat8(x);
      ASSERT_EQ((code & 0x80) != 0, std::signbit(x)) << x;
      if (std::isfinite(x)) {
        ASSERT_EQ(ValueOf(code), NearestFloat8(x)) << std::hexfloat << x;
      } else {
        ASSERT_EQ(code & 0x7f, 0x7f) << x;
      }
    }
  }
}

class Float8BlocksTest : public IsaTest {};

// Encodes and decodes; the bytes beyond what is written must stay.
std::vector<float> Through(const std::vector<float>& values, DType to) {
  const auto numel = static_cast<int64_t>(values.size());
  std::string blocks(static_cast<size_t>(Float8BlocksBytes(numel)) + 1, '\x5a');
  EncodeFloat8Blocks(values.data(), v1::DTYPE_FLOAT32, to, blocks.data(), numel);
  EXPECT_EQ(blocks.back(), '\x5a');
  std::vector<char> read(static_cast<size_t>(numel * DTypeSizeBytes(to)) + 1, '\x5a');
  DecodeFloat8Blocks(blocks.data(), read.data(), to, numel);
  EXPECT_EQ(read.back(), '\x5a');
  std::vector<char> rounded(read.size(), '\x5a');
  RoundToFloat8Blocks(values.data(), v1::DTYPE_FLOAT32, rounded.data(), to, numel);
  EXPECT_EQ(rounded, read) << "the owner reads what others do";
  std::vector<float> result(values.size());
  Cast(read.data(), to, result.data(), v1::DTYPE_FLOAT32, numel);
  return result;
}

std::vector<float> Want(std::vector<float> values, DType to) {
  const auto numel = static_cast<int64_t>(values.size());
  if (to != v1::DTYPE_FLOAT32) values = AsFloat(As16Bit(values, to), to);
  const double limit = to == v1::DTYPE_FLOAT16 ? 65504
                                               : std::ldexp(to == v1::DTYPE_BFLOAT16 ? 255 : 0xffffff,
                                                            to == v1::DTYPE_BFLOAT16 ? 120 : 104);
  RoundToFloat8(values.data(), numel, limit);
  return values;
}

void ExpectSame(const std::vector<float>& got, const std::vector<float>& want, DType to) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(want[i])) {
      ASSERT_TRUE(std::isnan(got[i])) << i << " in " << DTypeName(to);
    } else {
      ASSERT_EQ(BitCast<uint32_t>(got[i]), BitCast<uint32_t>(want[i]))
          << i << " of " << got.size() << " in " << DTypeName(to) << std::hexfloat << ": " << got[i] << ", want "
          << want[i];
    }
  }
}

constexpr DType kRead[] = {v1::DTYPE_FLOAT32, v1::DTYPE_BFLOAT16, v1::DTYPE_FLOAT16};

TEST_P(Float8BlocksTest, BlocksOfAllLengthsEqualTheReference) {
  for (const DType to : kRead) {
    for (const int64_t numel : {1, 2, 7, 127, 128, 129, 255, 256, 1023, 1024, 1025, 5000}) {
      for (const float scale : {1.0f, 0.02f, 3e4f, 1e-30f, 1e-42f, 1e30f}) {
        std::vector<float> values = Randoms(numel, static_cast<uint32_t>(numel));
        for (float& x : values) x *= scale;
        ExpectSame(Through(values, to), Want(values, to), to);
      }
    }
  }
}

TEST_P(Float8BlocksTest, EveryMagnitudeOfABlockEqualsTheReference) {
  for (const DType to : kRead) {
    for (uint32_t largest = 0; largest < 0x7f800000u; largest += 100'003) {
      std::vector<float> values = {BitCast<float>(largest)};
      for (uint32_t bits = largest; values.size() < 40; bits -= bits / 29) values.push_back(-BitCast<float>(bits));
      ExpectSame(Through(values, to), Want(values, to), to);
    }
  }
}

TEST_P(Float8BlocksTest, NanAndInfinityBecomeNanAndSpoilNoOther) {
  for (const DType to : kRead) {
    std::vector<float> values = Randoms(300, 5);
    values[3] = kNan;
    values[130] = kInfinity;
    values[131] = -kInfinity;
    const std::vector<float> got = Through(values, to);
    ExpectSame(got, Want(values, to), to);
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_EQ(std::isnan(got[i]), i == 3 || i == 130 || i == 131) << i;
    }
    EXPECT_TRUE(std::isnan(Through(std::vector<float>(128, kInfinity), to)[127]));
  }
  EXPECT_TRUE(std::isnan(Through({1e6f, 1}, v1::DTYPE_FLOAT16)[0])) << "an overflow of param_dtype is seen";
  EXPECT_EQ(Through({1e6f, 1}, v1::DTYPE_FLOAT16)[1], 1);
}

TEST_P(Float8BlocksTest, FiniteNumbersStayFinite) {
  EXPECT_EQ(Through({65504, -65504}, v1::DTYPE_FLOAT16), (std::vector<float>{65504, -65504}));
  const float largest = std::numeric_limits<float>::max();
  EXPECT_EQ(Through({largest, -largest}, v1::DTYPE_FLOAT32), (std::vector<float>{largest, -largest}));
}

TEST_P(Float8BlocksTest, ZerosKeepTheirSign) {
  for (const DType to : kRead) {
    const std::vector<float> got = Through({0.0f, -0.0f, 0.0f}, to);
    EXPECT_EQ(got, (std::vector<float>{0, 0, 0}));
    EXPECT_TRUE(!std::signbit(got[0]) && std::signbit(got[1]));
  }
}

TEST_P(Float8BlocksTest, RoundingAgainChangesNothing) {
  for (const DType to : kRead) {
    for (const float scale : {1.0f, 1e-38f, 3e4f}) {
      std::vector<float> values = Randoms(4096, 9);
      for (float& x : values) x *= scale;
      const std::vector<float> once = Through(values, to);
      ExpectSame(Through(once, to), once, to);
    }
  }
}

TEST_P(Float8BlocksTest, ErrorIsWithinItsBound) {
  for (const float spread : {1.0f, 6.0f}) {
    std::vector<float> values = Randoms(128 * 200, 11);
    for (float& x : values) x = std::copysign(std::exp2(spread * x), x);  // over many orders of magnitude
    const std::vector<float> got = Through(values, v1::DTYPE_FLOAT32);
    for (size_t first = 0; first < values.size(); first += 128) {
      float largest = 0;
      for (size_t i = first; i < first + 128; ++i) largest = std::max(largest, std::fabs(values[i]));
      for (size_t i = first; i < first + 128; ++i) {
        EXPECT_LE(std::fabs(got[i] - values[i]), std::max(std::fabs(values[i]) / 16, std::ldexp(largest, -17))) << i;
      }
    }
  }
}

TEST_P(Float8BlocksTest, PartsOfWholeBlocksAreTheWhole) {
  const std::vector<float> values = Randoms(1000, 3);
  std::string whole(static_cast<size_t>(Float8BlocksBytes(1000)), '\0');
  EncodeFloat8Blocks(values.data(), v1::DTYPE_FLOAT32, v1::DTYPE_BFLOAT16, whole.data(), 1000);
  std::string parts(whole.size(), '\0');
  for (int64_t first = 0; first < 1000; first += 384) {
    EncodeFloat8Blocks(values.data() + first, v1::DTYPE_FLOAT32, v1::DTYPE_BFLOAT16,
                       parts.data() + Float8BlocksBytes(first), std::min<int64_t>(384, 1000 - first));
  }
  EXPECT_EQ(parts, whole);
}

// Who decodes is no judge of what a node sends: whatever comes has a value.
TEST_P(Float8BlocksTest, AnyBytesAreDecoded) {
  std::string blocks(kFloat8BlockBytes, '\0');
  for (int i = 0; i < 128; ++i) blocks[static_cast<size_t>(i) + 1] = static_cast<char>(2 * i + 1);
  for (int scale = 0; scale < 256; ++scale) {
    blocks[0] = static_cast<char>(scale);
    std::vector<float> got(128);
    DecodeFloat8Blocks(blocks.data(), got.data(), v1::DTYPE_FLOAT32, 128);
    for (int i = 0; i < 128; ++i) {
      const double want = scale == 255 ? kNan : ValueOf(2 * i + 1) * std::ldexp(1.0, scale - 127);
      const double limit = std::numeric_limits<float>::max();
      if (std::isnan(want)) {
        EXPECT_TRUE(std::isnan(got[static_cast<size_t>(i)]));
      } else {
        EXPECT_EQ(got[static_cast<size_t>(i)], static_cast<float>(std::clamp(want, -limit, limit))) << scale;
      }
    }
  }
}

SHARDD_FOR_EACH_ISA(Float8BlocksTest);

}  // namespace
}  // namespace shardd
