#include "common/tensor/muon.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/tensor/float_bits.h"
#include "common/tensor/matmul.h"
#include "common/tensor/update_log.h"
#include "tests/common/tensor/isa_test_util.h"

namespace shardd {
namespace {

constexpr DType kFp32 = v1::DTYPE_FLOAT32;
using Doubles = std::vector<double>;

float Bf16(double x) { return tensor::Bf16ToFloat(tensor::FloatToBf16(static_cast<float>(x))); }

MuonParams Usual() {
  MuonParams params;
  params.lr = 0.02, params.weight_decay = 0.1, params.momentum = 0.95, params.eps = 1e-7, params.nesterov = true;
  params.a = 3.4445, params.b = -4.7750, params.c = 2.0315, params.ns_steps = 5, params.grad_scale = 0.5;
  return params;
}

// A matrix with its memory.
struct Held {
  Held(int64_t rows, int64_t cols, const MuonParams& params)
      : p(Randoms(rows * cols, 1)), g(Randoms(rows * cols, 2)), buf(Randoms(rows * cols, 3)) {
    workspace.resize(static_cast<size_t>(MuonWorkspaceBytes(rows, cols)) / sizeof(float) + 16);
    matrix.params = params;
    matrix.rows = rows, matrix.cols = cols;
  }
  MuonMatrix& At() {
    matrix.p = p.data(), matrix.param_dtype = kFp32, matrix.g = g.data(), matrix.buf = buf.data();
    matrix.workspace = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(workspace.data()) + 63) / 64 * 64);
    return matrix;
  }
  int64_t items() const { return MuonItems(matrix.rows, matrix.cols, matrix.params.ns_steps); }
  void Run(UpdateLog* log = nullptr, int64_t first = 0) {
    for (int64_t item = 0; item < items(); ++item) RunMuonItem(At(), item, log, first);
  }
  std::vector<float> p, g, buf, workspace;
  MuonMatrix matrix;
};

// The formula of muon.h, in double but for what it rounds.
struct Plain {
  explicit Plain(const Held& held) : m(held.matrix) {
    const MuonParams& params = m.params;
    const auto w = static_cast<float>(1 - params.momentum);
    x.resize(held.g.size());
    for (size_t i = 0; i < x.size(); ++i) {
      const double g = held.g[i] * params.grad_scale;
      buf.push_back(held.buf[i] + w * (g - held.buf[i]));
      x[i] = Bf16(params.nesterov ? g + params.momentum * (buf[i] - g) : buf[i]);
    }
    double sum = 0;
    for (const double value : x) sum += value * value;
    const double norm = std::max(Bf16(std::sqrt(sum)), Bf16(params.eps));
    for (double& value : x) value = Bf16(value / norm);
    const bool tall = m.rows > m.cols;
    const auto rows = static_cast<size_t>(std::min(m.rows, m.cols)),
               cols = static_cast<size_t>(std::max(m.rows, m.cols));
    const auto place = [&](size_t r, size_t c) { return tall ? c * rows + r : r * cols + c; };
    for (int step = 0; step < params.ns_steps; ++step) {
      Doubles gram(rows * rows), polynomial(rows * rows), next(x.size());
      for (size_t i = 0; i < rows; ++i) {
        for (size_t j = 0; j < rows; ++j) {
          double of = 0;
          for (size_t l = 0; l < cols; ++l) of += x[place(i, l)] * x[place(j, l)];
          gram[i * rows + j] = Bf16(of);
        }
      }
      for (size_t i = 0; i < rows; ++i) {
        for (size_t j = 0; j < rows; ++j) {
          double of = 0;
          for (size_t l = 0; l < rows; ++l) of += gram[i * rows + l] * gram[l * rows + j];
          polynomial[i * rows + j] = Bf16(params.b * gram[i * rows + j] + params.c * of);
        }
      }
      for (size_t i = 0; i < rows; ++i) {
        for (size_t j = 0; j < cols; ++j) {
          double of = 0;
          for (size_t l = 0; l < rows; ++l) of += polynomial[i * rows + l] * x[place(l, j)];
          next[place(i, j)] = Bf16(params.a * x[place(i, j)] + of);
        }
      }
      x = next;
    }
  }
  const MuonMatrix& m;
  Doubles x, buf;
};

// The update's direction, which p has gone: by lr times the adjustment.
Doubles Direction(const Held& before, const Held& after, double adjusted) {
  Doubles x;
  for (size_t i = 0; i < before.p.size(); ++i) {
    const double decayed = before.p[i] * (1 - before.matrix.params.lr * before.matrix.params.weight_decay);
    x.push_back((decayed - after.p[i]) / (before.matrix.params.lr * adjusted));
  }
  return x;
}

double Distance(const Doubles& got, const Doubles& want) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  return std::sqrt(difference / (size == 0 ? 1 : size));
}

constexpr int64_t kShapes[][2] = {{1, 1},   {1, 40},   {40, 1},   {7, 15},   {15, 7},
                                  {33, 33}, {60, 300}, {300, 60}, {270, 290}};

// A sum in another order may round to the next number of bf16, and five steps carry that on: some of its
// roundings (2^-9) are left of it: 5e-3 of the update was measured where it is square.
TEST(Muon, OfAnyShapeIsTheFormula) {
  for (const auto& [rows, cols] : kShapes) {
    SCOPED_TRACE(absl::StrCat(rows, " x ", cols));
    Held held(rows, cols, Usual());
    const Held before = held;
    const Plain plain(before);
    held.Run();
    const double adjusted = std::sqrt(std::max(1.0, static_cast<double>(rows) / static_cast<double>(cols)));
    EXPECT_LT(Distance(Direction(before, held, adjusted), plain.x), 1e-2);
    for (size_t i = 0; i < held.buf.size(); ++i) ASSERT_NEAR(held.buf[i], plain.buf[i], 1e-6) << i;
  }
}

// Of several blocks of elements and of rows, and of tiles of each size.
TEST(Muon, InManyItemsIsTheFormula) {
  MuonParams params = Usual();
  params.ns_steps = 1;
  for (const auto& [rows, cols] : std::initializer_list<std::array<int64_t, 2>>{{600, 450}, {450, 600}, {1100, 240}}) {
    SCOPED_TRACE(absl::StrCat(rows, " x ", cols));
    Held held(rows, cols, params);
    const Held before = held;
    const Plain plain(before);
    UpdateLog log = {};
    log.Begin(1);
    held.Run(&log);
    EXPECT_EQ(log.done(1), 2 * rows * cols);
    const double adjusted = std::sqrt(std::max(1.0, static_cast<double>(rows) / static_cast<double>(cols)));
    EXPECT_LT(Distance(Direction(before, held, adjusted), plain.x), 1e-2);
    for (size_t i = 0; i < held.buf.size(); ++i) ASSERT_NEAR(held.buf[i], plain.buf[i], 1e-6) << i;
    // The rest of it from the second block of either.
    for (const int64_t done : {(int64_t{1} << 18) + 77, rows * cols + (int64_t{1} << 18) + 77}) {
      Held rest = before;
      std::copy_n(held.buf.begin(), std::min(done, rows * cols), rest.buf.begin());
      std::copy_n(held.p.begin(), std::max<int64_t>(0, done - rows * cols), rest.p.begin());
      RunMuonFrom(rest.At(), done, nullptr, 0);
      EXPECT_TRUE(rest.p == held.p && rest.buf == held.buf) << done;
    }
  }
}

TEST(Muon, HasTorchsOptions) {
  MuonParams params = Usual();
  params.nesterov = false, params.momentum = 0.25, params.match_rms_adamw = true, params.ns_steps = 2;
  Held held(20, 30, params);
  const Held before = held;
  const Plain plain(before);
  held.Run();
  EXPECT_LT(Distance(Direction(before, held, 0.2 * std::sqrt(30.0)), plain.x), 1e-2);
  for (size_t i = 0; i < held.buf.size(); ++i) ASSERT_NEAR(held.buf[i], plain.buf[i], 1e-6) << i;
}

// What orthogonalised means: with coefficients that converge, X X^T is the identity.
TEST(Muon, OrthogonalisesWhereItsStepsConverge) {
  MuonParams params = Usual();
  params.a = 1.875, params.b = -1.25, params.c = 0.375, params.ns_steps = 30;
  Held held(12, 40, params);
  const Held before = held;
  held.Run();
  const Doubles x = Direction(before, held, 1);
  for (size_t i = 0; i < 12; ++i) {
    for (size_t j = 0; j < 12; ++j) {
      double of = 0;
      for (size_t l = 0; l < 40; ++l) of += x[i * 40 + l] * x[j * 40 + l];
      EXPECT_NEAR(of, i == j ? 1 : 0, 0.03) << i << ", " << j;
    }
  }
}

TEST(Muon, NothingComesOfAGradientOfZeros) {
  Held held(5, 9, Usual());
  held.g.assign(held.g.size(), 0), held.buf.assign(held.buf.size(), 0);
  const Held before = held;
  held.Run();
  for (size_t i = 0; i < held.p.size(); ++i) EXPECT_FLOAT_EQ(held.p[i], before.p[i] * 0.998F);
  EXPECT_EQ(held.buf, before.buf);
}

TEST(Muon, WhatIsNotANumberShowsEverywhere) {
  Held held(5, 9, Usual());
  held.g[7] = std::numeric_limits<float>::infinity();
  held.Run();
  for (const float x : held.p) EXPECT_TRUE(std::isnan(x));
}

class MuonIsa : public IsaTest {};

// With a log, with a cast copy, and at any address of the workspace, too.
TEST_P(MuonIsa, EveryMachineGivesTheSameBits) {
  for (const auto& [rows, cols] : kShapes) {
    SCOPED_TRACE(absl::StrCat(rows, " x ", cols));
    tensor::SetIsaForTest(tensor::Isa::kBase);
    Held want(rows, cols, Usual());
    want.Run();
    tensor::SetIsaForTest(GetParam());
    Held got(rows, cols, Usual());
    std::vector<uint16_t> cast(got.p.size());
    got.matrix.cast_dst = cast.data(), got.matrix.cast_dtype = v1::DTYPE_BFLOAT16;
    UpdateLog log = {};
    log.Begin(3, 1000);
    got.Run(&log, 1000);
    EXPECT_TRUE(got.p == want.p && got.buf == want.buf);
    EXPECT_EQ(cast, As16Bit(want.p, v1::DTYPE_BFLOAT16));
    EXPECT_EQ(log.done(3), 1000 + 2 * rows * cols);
  }
}

SHARDD_FOR_EACH_ISA(MuonIsa);

TEST(Muon, ALowPrecisionParameterIsRoundedOnce) {
  for (const DType dtype : {v1::DTYPE_BFLOAT16, v1::DTYPE_FLOAT16}) {
    Held want(6, 10, Usual()), held(6, 10, Usual());
    std::vector<uint16_t> p = As16Bit(held.p, dtype);
    want.p = AsFloat(p, dtype);
    want.Run();
    held.At().p = p.data();
    held.matrix.param_dtype = dtype;
    for (int64_t item = 0; item < held.items(); ++item) RunMuonItem(held.matrix, item);
    EXPECT_EQ(p, As16Bit(want.p, dtype));
  }
}

// Of an update of which so much is done: in the buffer, between the two, and in the parameter.
TEST(Muon, TheRestOfAnUpdateHasTheSameBits) {
  constexpr int64_t kNumel = 15 * 21;
  Held want(15, 21, Usual());
  const Held before = want;
  want.Run();
  for (const int64_t done : {int64_t{0}, int64_t{100}, kNumel, kNumel + 64, 2 * kNumel}) {
    Held held = before;
    std::copy(want.buf.begin(), want.buf.begin() + std::min(done, kNumel), held.buf.begin());
    if (done > kNumel) std::copy(want.p.begin(), want.p.begin() + (done - kNumel), held.p.begin());
    RunMuonFrom(held.At(), done, nullptr, 0);
    EXPECT_TRUE(held.p == want.p && held.buf == want.buf) << done;
  }
}

// A tile of a product is the product's, whatever is around it, and rows may have gaps.
TEST(MatMul, GivesTheSameBitsWhereverItsOperandsLie) {
  constexpr int64_t kM = 65, kN = 33, kK = 517;
  const std::vector<float> a = Randoms(kM * kK, 1), b = Randoms(kN * kK, 2);
  std::vector<float> want(kM * kN);
  MatMul({a.data(), kK}, {b.data(), kK}, true, want.data(), kN, kM, kN, kK);
  for (int64_t i = 0; i < kM; ++i) {
    double of = 0;
    for (int64_t l = 0; l < kK; ++l) of += static_cast<double>(a[i * kK + l]) * b[5 * kK + l];
    EXPECT_NEAR(want[i * kN + 5], of, 1e-3);
  }
  for (int64_t shift = 1; shift < 5; ++shift) {
    constexpr int64_t kStride = kK + 11;
    std::vector<float> wide(kM * kStride + 8), transposed(kK * (kN + 3) + 8), got(kM * (kN + 2) + 8);
    for (int64_t i = 0; i < kM; ++i) std::copy_n(a.data() + i * kK, kK, wide.data() + shift + i * kStride);
    for (int64_t j = 0; j < kN; ++j) {
      for (int64_t l = 0; l < kK; ++l) transposed[shift + l * (kN + 3) + j] = b[j * kK + l];
    }
    MatMul({wide.data() + shift, kStride}, {transposed.data() + shift, kN + 3}, false, got.data() + shift, kN + 2, kM,
           kN, kK);
    for (int64_t i = 0; i < kM; ++i) {
      for (int64_t j = 0; j < kN; ++j) ASSERT_EQ(got[shift + i * (kN + 2) + j], want[i * kN + j]) << i << ", " << j;
    }
  }
}

}  // namespace
}  // namespace shardd
