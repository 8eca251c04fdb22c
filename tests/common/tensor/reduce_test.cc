#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "common/tensor/float_bits.h"
#include "tests/common/tensor/isa_test_util.h"

namespace shardd {
namespace {

constexpr DType kNone = v1::DTYPE_UNSPECIFIED;

// Sources in `dtype`, and the same numbers as fp32.
struct Sources {
  Sources(int count, DType dtype, int64_t numel) : dtype(dtype) {
    for (int k = 0; k < count; ++k) {
      values.push_back(Randoms(numel, static_cast<uint32_t>(100 + k)));
      if (dtype != v1::DTYPE_FLOAT32) {
        narrow.push_back(As16Bit(values.back(), dtype));
        values.back() = AsFloat(narrow.back(), dtype);
      }
    }
    for (int k = 0; k < count; ++k) {
      pointers.push_back(dtype == v1::DTYPE_FLOAT32 ? static_cast<const void*>(values[k].data())
                                                    : static_cast<const void*>(narrow[k].data()));
    }
  }
  DType dtype;
  std::vector<std::vector<float>> values;
  std::vector<std::vector<uint16_t>> narrow;
  std::vector<const void*> pointers;
};

float Round(DType dtype, float x) {
  if (dtype == v1::DTYPE_BFLOAT16) return tensor::Bf16ToFloat(tensor::FloatToBf16(x));
  return dtype == v1::DTYPE_FLOAT16 ? tensor::HalfToFloat(tensor::FloatToHalf(x)) : x;
}

struct Rounding {
  DType reduce_dtype = kNone;
  DType keep = kNone;
};

// The contract, one element at a time.
std::vector<float> Reference(const Sources& sources, const Rounding& rounding, float scale, bool accumulate,
                             const std::vector<float>& before) {
  const DType reduce_dtype = rounding.reduce_dtype == kNone ? sources.dtype : rounding.reduce_dtype;
  std::vector<float> result(before.size());
  for (size_t i = 0; i < result.size(); ++i) {
    volatile float sum = Round(reduce_dtype, sources.values[0][i]);  // volatile: no wider or fused arithmetic
    for (size_t k = 1; k < sources.values.size(); ++k) sum = sum + Round(reduce_dtype, sources.values[k][i]);
    sum = sum * scale;
    sum = Round(rounding.keep, Round(reduce_dtype, sum));
    result[i] = accumulate ? Round(rounding.keep, before[i] + sum) : sum;
  }
  return result;
}

class ReduceTest : public IsaTest {};

TEST_P(ReduceTest, EveryDtypeRoundingCountAndModeMatchesTheReferenceBits) {
  const int64_t numel = 2 * 1024 + 13;
  for (DType dtype : {v1::DTYPE_FLOAT32, v1::DTYPE_BFLOAT16, v1::DTYPE_FLOAT16}) {
    for (int count : {1, 2, 3, 4, 5, 7, 8, 9}) {
      const Sources sources(count, dtype, numel);
      for (DType reduce_dtype : {kNone, v1::DTYPE_FLOAT32, v1::DTYPE_BFLOAT16, v1::DTYPE_FLOAT16}) {
        for (DType keep : {kNone, v1::DTYPE_FLOAT32, v1::DTYPE_BFLOAT16, v1::DTYPE_FLOAT16}) {
          for (bool accumulate : {false, true}) {
            const std::vector<float> before = Randoms(numel, 7);
            std::vector<float> got = before;
            ReduceSources(sources.pointers, dtype, reduce_dtype, keep, 1.0f / 3, accumulate, got.data(), numel);
            EXPECT_TRUE(got == Reference(sources, {reduce_dtype, keep}, 1.0f / 3, accumulate, before))
                << DTypeName(dtype) << " reduced in " << DTypeName(reduce_dtype) << " kept in " << DTypeName(keep)
                << ", " << count << " sources, accumulate " << accumulate;
          }
        }
      }
    }
  }
}

TEST_P(ReduceTest, LargeUnalignedRangesAreStreamedWithTheSameBits) {
  const int64_t numel = 600'007;
  for (int count : {2, 6}) {
    for (DType reduce_dtype : {kNone, v1::DTYPE_BFLOAT16}) {
      const Sources sources(count, v1::DTYPE_FLOAT32, numel);
      std::vector<float> got(static_cast<size_t>(numel + 8), 123.0f);
      ReduceSources(sources.pointers, v1::DTYPE_FLOAT32, reduce_dtype, kNone, 0.5f, false, got.data() + 3, numel);
      const std::vector<float> want =
          Reference(sources, {reduce_dtype}, 0.5f, false, std::vector<float>(static_cast<size_t>(numel)));
      EXPECT_TRUE(std::equal(want.begin(), want.end(), got.begin() + 3)) << count << " " << DTypeName(reduce_dtype);
      EXPECT_EQ(got[2], 123.0f);
      EXPECT_EQ(got[static_cast<size_t>(numel + 3)], 123.0f);
    }
  }
}

TEST_P(ReduceTest, WithoutAccumulationWhatIsInTheDestinationDoesNotMatter) {
  const float source = 2;
  const void* sources[] = {&source};
  float dst = std::numeric_limits<float>::quiet_NaN();
  ReduceSources(sources, v1::DTYPE_FLOAT32, kNone, kNone, 0.5f, false, &dst, 1);
  EXPECT_EQ(dst, 1.0f);
}

TEST_P(ReduceTest, TheOrderOfSourcesIsTheOrderOfAddition) {
  // (1e8 + -1e8) + 1 is 1; 1e8 + (-1e8 + 1) is 0 in fp32.
  const float a = 1e8f, b = -1e8f, c = 1;
  float dst = 0;
  const void* forward[] = {&a, &b, &c};
  ReduceSources(forward, v1::DTYPE_FLOAT32, kNone, kNone, 1, false, &dst, 1);
  EXPECT_EQ(dst, 1.0f);
  const void* backward[] = {&c, &b, &a};
  ReduceSources(backward, v1::DTYPE_FLOAT32, kNone, kNone, 1, false, &dst, 1);
  EXPECT_EQ(dst, 0.0f);
}

TEST_P(ReduceTest, RoundingToFp16OverflowsToInfinityAsOnTheWire) {
  const float big = 70000, small = 1;
  float dst = 0;
  const void* sources[] = {&big, &small};
  ReduceSources(sources, v1::DTYPE_FLOAT32, v1::DTYPE_FLOAT16, kNone, 1, false, &dst, 1);
  EXPECT_EQ(dst, INFINITY);
}

// Two tensors of the lower dtype as they are added in it, then halved in it: what two ranks of any library do. A sum
// that cannot be represented tells that from fp32.
TEST_P(ReduceTest, TwoSourcesAreAddedAndHalvedInTheReduceDtype) {
  const int64_t numel = 3001;
  for (DType dtype : {v1::DTYPE_BFLOAT16, v1::DTYPE_FLOAT16}) {
    for (DType source_dtype : {v1::DTYPE_FLOAT32, dtype}) {
      const Sources sources(2, source_dtype, numel);
      std::vector<float> got(static_cast<size_t>(numel)), want(got.size()), in_fp32(got.size());
      for (size_t i = 0; i < want.size(); ++i) {
        const float sum = Round(dtype, sources.values[0][i]) + Round(dtype, sources.values[1][i]);
        want[i] = Round(dtype, Round(dtype, sum) / 2);
        in_fp32[i] = sum / 2;
      }
      ReduceSources(sources.pointers, source_dtype, dtype, kNone, 0.5f, false, got.data(), numel);
      EXPECT_EQ(got, want) << DTypeName(dtype) << " of " << DTypeName(source_dtype);
      EXPECT_NE(got, in_fp32);
    }
  }
}

TEST_P(ReduceTest, DoublesAreAddedInDoubleAndRoundedOnce) {
  constexpr int64_t kNumel = 5000;
  std::vector<std::vector<double>> values;
  std::vector<const void*> pointers;
  for (int count = 1; count <= 9; ++count) {
    const std::vector<float> coarse = Randoms(kNumel, static_cast<uint32_t>(count));
    const std::vector<float> fine = Randoms(kNumel, static_cast<uint32_t>(50 + count));
    values.emplace_back();
    for (size_t i = 0; i < coarse.size(); ++i) values.back().push_back(coarse[i] + 1e-9 * double{fine[i]});
    pointers.clear();
    for (const std::vector<double>& source : values) pointers.push_back(source.data());
    for (const bool accumulate : {false, true}) {
      std::vector<float> got(kNumel, 0.5f);
      ReduceSources(pointers, v1::DTYPE_FLOAT64, kNone, kNone, 0.25f, accumulate, got.data(), kNumel);
      for (size_t i = 0; i < got.size(); ++i) {
        volatile double sum = 0;  // volatile: no fused arithmetic
        for (const std::vector<double>& source : values) sum = sum + source[i];
        sum = sum * 0.25;
        const double exact = accumulate ? 0.5 + sum : sum;
        if (count <= 4) {
          ASSERT_EQ(got[i], static_cast<float>(exact)) << count << " sources, element " << i;
        } else {  // four at a time: what is carried on is fp32
          ASSERT_NEAR(got[i], exact, 1e-6) << count << " sources, element " << i;
        }
      }
    }
  }
}

TEST_P(ReduceTest, SquaredNormsAreExactEnoughAndTheSameEverywhere) {
  for (int64_t numel : {1, 31, 32, 33, 4095, 4096, 4097, 100'003}) {
    const std::vector<float> values = Randoms(numel, 3);
    long double want = 0;
    for (float x : values) want += static_cast<long double>(x) * x;
    const double got = SquaredNorm(values.data(), numel);
    EXPECT_NEAR(got, static_cast<double>(want), 1e-12 * static_cast<double>(want)) << numel;
    tensor::SetIsaForTest(tensor::Isa::kBase);
    EXPECT_EQ(SquaredNorm(values.data(), numel), got) << numel;
    tensor::SetIsaForTest(GetParam());
  }
  EXPECT_EQ(SquaredNorm(nullptr, 0), 0.0);
}

TEST_P(ReduceTest, SquaredNormDoesNotOverflowWhereFp32Would) {
  const std::vector<float> values(10, 1e30f);
  EXPECT_NEAR(SquaredNorm(values.data(), 10), 1e61, 1e55);
}

TEST_P(ReduceTest, SquaredNormOfANonFiniteElementIsNotFinite) {
  for (float bad : {INFINITY, -INFINITY, NAN}) {
    for (size_t at : {0u, 40u, 99u}) {
      std::vector<float> values(100, 1.0f);
      values[at] = bad;
      EXPECT_FALSE(std::isfinite(SquaredNorm(values.data(), 100))) << bad << " at " << at;
    }
  }
}

SHARDD_FOR_EACH_ISA(ReduceTest);

}  // namespace
}  // namespace shardd
