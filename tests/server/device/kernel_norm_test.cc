#include "tests/server/device/kernel_data.h"

namespace shardd::cuda {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr int64_t kSlice = kNormSliceBlocks * kNormBlockNumel;

class KernelNormTest : public KernelTest {
 protected:
  // `begin` and the elements of src, as a CPU device adds them.
  static Norm Want(const Norm& begin, const Elements& src) {
    Norm norm = begin;
    const float* at = static_cast<const float*>(src.data());
    for (int64_t first = 0; first < src.numel(); first += kSlice) {
      norm.Add(at + first, std::min(kSlice, src.numel() - first));
    }
    return norm;
  }
  Norm Run(const Norm& begin, const Elements& src, int offset = 0, uint32_t grid = 0) {
    const Buffer in(*runner_, src, offset);
    Elements state = MakeElements(v1::DTYPE_FLOAT64, 2);
    const NormState before = begin.state();
    std::memcpy(state.data(), &before, sizeof(before));
    const Buffer result(*runner_, state);
    // Scratch holds what an earlier owner left.
    const Buffer scratch(*runner_, AnyBits(v1::DTYPE_FLOAT64, NormScratchBytes(src.numel()) / 8, 1));
    runner_->Launch(NormArgs{in.floats(), src.numel(), begin.order(), static_cast<NormState*>(scratch.data()),
                             static_cast<NormState*>(result.data())},
                    grid);
    scratch.Get();
    NormState after;
    std::memcpy(&after, result.Get().data(), sizeof(after));
    Norm norm(begin.order());
    norm.set_state(after);
    return norm;
  }
};

TEST_F(KernelNormTest, HasTheCpusBitsWhereNoPowIsCalled) {
  for (const double order : {1.0, 2.0, 3.0, 4.0, kInfinite}) {
    for (const int64_t numel : {1L, 31L, 32L, 33L, 1000L, 4095L, 4096L, 4097L, 100003L}) {
      const Elements src = Values(v1::DTYPE_FLOAT32, numel, static_cast<uint32_t>(numel), /*special=*/false);
      for (const Norm& begin : {Norm(order), Want(Norm(order), src)}) {
        const Norm got = Run(begin, src, static_cast<int>(numel % 4)), want = Want(begin, src);
        EXPECT_EQ(got.state().scale, want.state().scale) << "order " << order << ", " << numel;
        EXPECT_EQ(got.state().sum, want.state().sum) << "order " << order << ", " << numel;
      }
    }
  }
}

TEST_F(KernelNormTest, SeveralSlicesAreAddedAsOnTheCpuDevice) {
  const Elements src = Values(v1::DTYPE_FLOAT32, 2 * kSlice + 5001, 4, /*special=*/false);
  const Norm got = Run(Norm(2), src, 1), want = Want(Norm(2), src);
  EXPECT_EQ(got.state().sum, want.state().sum);
}

TEST_F(KernelNormTest, OtherOrdersAreWithinRoundingOfPow) {
  for (const double order : {0.5, 2.5, 7.0, 300.0}) {
    Elements src = Values(v1::DTYPE_FLOAT32, 30001, 9, /*special=*/false);
    for (int64_t i = 0; i < src.numel(); ++i) src.floats()[i] *= i < 5000 ? 0 : i > 20000 ? 1e30f : 1e-30f;
    const double got = Run(Norm(order), src).value(), want = Want(Norm(order), src).value();
    EXPECT_NEAR(got, want, want * 1e-12) << "order " << order;
  }
}

TEST_F(KernelNormTest, OneNanOrInfinityDecides) {
  for (const double order : {1.0, 2.0, 3.0, 4.0, kInfinite, 2.5}) {
    for (const int64_t at : {0L, 4096L, 9999L}) {
      Elements src = Values(v1::DTYPE_FLOAT32, 10000, 2, /*special=*/false);
      src.floats()[at] = -std::numeric_limits<float>::infinity();
      EXPECT_EQ(Run(Norm(order), src).value(), kInfinite) << "order " << order << " at " << at;
      src.floats()[5000] = std::numeric_limits<float>::quiet_NaN();
      EXPECT_TRUE(std::isnan(Run(Norm(order), src).value())) << "order " << order << " at " << at;
    }
  }
}

TEST_F(KernelNormTest, ZerosAndDenormalsCount) {
  Elements src = MakeElements(v1::DTYPE_FLOAT32, 5000);
  for (const double order : {1.0, 2.0, kInfinite, 2.5}) EXPECT_EQ(Run(Norm(order), src).value(), 0) << order;
  src.floats()[4999] = 1e-41f;
  for (const double order : {1.0, 2.0, kInfinite, 2.5}) {
    EXPECT_NEAR(Run(Norm(order), src).value(), 1e-41, 1e-44) << order;
  }
}

TEST_F(KernelNormTest, AnyGridGivesTheSame) {
  const Elements src = Values(v1::DTYPE_FLOAT32, 100003, 6, /*special=*/false);
  for (const double order : {2.0, 2.5}) {
    const Norm want = Run(Norm(order), src);
    for (const uint32_t grid : {1u, 2u, 50u}) {
      EXPECT_EQ(Run(Norm(order), src, 0, grid).state().sum, want.state().sum) << "order " << order << ", grid " << grid;
    }
  }
}

}  // namespace
}  // namespace shardd::cuda
