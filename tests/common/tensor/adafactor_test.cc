#include "common/tensor/adafactor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/tensor/update_log.h"
#include "tests/common/tensor/isa_test_util.h"

namespace shardd {
namespace {

constexpr DType kFp32 = v1::DTYPE_FLOAT32;

AdafactorParams Usual(int64_t step = 1) {
  AdafactorParams params;
  params.lr = 0.05, params.beta2_decay = -0.8, params.eps2 = 1e-3, params.d = 1, params.weight_decay = 0.1;
  params.step = step, params.grad_scale = 0.5;
  return params;
}

AdafactorShape Matrix(int64_t rows, int64_t cols, int64_t matrices = 1) { return {true, matrices, rows, cols}; }
AdafactorShape Vector(int64_t numel) { return {false, 1, 1, numel}; }

// A parameter with its memory; states are not negative.
struct Held {
  Held(const AdafactorShape& shape, const AdafactorParams& params)
      : p(Randoms(shape.numel(), 1)),
        g(Randoms(shape.numel(), 2)),
        row(Randoms(shape.row_numel(), 3)),
        col(Randoms(shape.col_numel(), 4)) {
    for (float& x : row) x *= x;
    for (float& x : col) x *= x;
    workspace.assign(static_cast<size_t>(AdafactorWorkspaceBytes(shape)) / sizeof(float) + 16,
                     std::numeric_limits<float>::quiet_NaN());
    tensor.params = params;
    tensor.shape = shape;
    tensor.param_dtype = kFp32;
  }
  AdafactorTensor& At() {
    tensor.p = p.data(), tensor.g = g.data(), tensor.row = row.data();
    tensor.col = tensor.shape.is_factored ? col.data() : nullptr;
    tensor.workspace = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(workspace.data()) + 63) / 64 * 64);
    return tensor;
  }
  int64_t items() const { return AdafactorItems(tensor.shape); }
  int64_t states() const { return tensor.shape.row_numel() + tensor.shape.col_numel(); }
  void Run(UpdateLog* log = nullptr, int64_t first = 0) {
    for (int64_t item = 0; item < items(); ++item) RunAdafactorItem(At(), item, log, first);
  }
  bool operator==(const Held& other) const { return p == other.p && row == other.row && col == other.col; }
  std::vector<float> p, g, row, col, workspace;
  AdafactorTensor tensor;
};

// The formula of adafactor.h, in double.
struct Plain {
  explicit Plain(const Held& held)
      : p(held.p.begin(), held.p.end()), row(held.row.begin(), held.row.end()), col(held.col.begin(), held.col.end()) {
    const AdafactorParams& params = held.tensor.params;
    const AdafactorShape& shape = held.tensor.shape;
    const auto rows = static_cast<size_t>(shape.rows), cols = static_cast<size_t>(shape.cols);
    const double number = static_cast<double>(params.step), weight = std::pow(number, params.beta2_decay);
    const double eps1 = params.eps1 < 0 ? std::ldexp(1.0, -23) : params.eps1;
    const double alpha = std::max(params.eps2, Rms(p)) * std::min(params.lr, 1 / std::sqrt(number));
    std::vector<double> g, u(p.size());
    for (const float value : held.g) g.push_back(value * params.grad_scale);
    if (shape.is_factored) {
      for (size_t m = 0; m < static_cast<size_t>(shape.matrices); ++m) {
        const auto square = [&](size_t r, size_t c) { return std::pow(g[(m * rows + r) * cols + c], 2); };
        double mean = 0;
        for (size_t r = 0; r < rows; ++r) {
          double sum = 0;
          for (size_t c = 0; c < cols; ++c) sum += square(r, c);
          double& state = row[m * rows + r];
          state += weight * (sum / static_cast<double>(cols) - state);
          mean += state / static_cast<double>(rows);
        }
        for (size_t c = 0; c < cols; ++c) {
          double sum = 0;
          for (size_t r = 0; r < rows; ++r) sum += square(r, c);
          col[m * cols + c] += weight * (sum / static_cast<double>(rows) - col[m * cols + c]);
        }
        for (size_t r = 0; r < rows; ++r) {
          for (size_t c = 0; c < cols; ++c) {
            const double v = row[m * rows + r] * col[m * cols + c] / std::max(mean, eps1);
            const size_t i = (m * rows + r) * cols + c;
            u[i] = g[i] / std::sqrt(std::max(v, eps1 * eps1));
          }
        }
      }
    } else {
      for (size_t i = 0; i < p.size(); ++i) {
        row[i] += weight * (g[i] * g[i] - row[i]);
        u[i] = g[i] / std::sqrt(std::max(row[i], eps1 * eps1));
      }
    }
    const double divisor = std::max(1.0, Rms(u) / params.d);
    for (size_t i = 0; i < p.size(); ++i) {
      p[i] = p[i] * (1 - params.lr * params.weight_decay) - alpha / divisor * u[i];
    }
  }
  static double Rms(const std::vector<double>& values) {
    double sum = 0;
    for (const double value : values) sum += value * value;
    return std::sqrt(sum / static_cast<double>(values.size()));
  }
  std::vector<double> p, row, col;
};

void ExpectClose(const std::vector<float>& got, const std::vector<double>& want, const char* what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], want[i], 2e-6 * std::max(1.0, std::abs(want[i]))) << what << " " << i;
  }
}

const AdafactorShape kShapes[] = {Matrix(1, 1),      Matrix(1, 40),    Matrix(40, 1),       Matrix(7, 15),
                                  Matrix(33, 33),    Matrix(300, 260), Matrix(3, 5, 4),     Matrix(3, 3, 90),
                                  Matrix(1, 1, 6),   Vector(1),        Vector(77),          Vector(5000),
                                  Matrix(600, 1025), Vector(600000),   Matrix(2, 300, 1000)};

std::string NameOf(const AdafactorShape& shape) {
  return absl::StrCat(shape.matrices, " x ", shape.rows, " x ", shape.cols, shape.is_factored ? "" : ", a vector");
}

TEST(Adafactor, OfAnyShapeAndStepIsTheFormula) {
  for (const AdafactorShape& shape : kShapes) {
    for (const int64_t step : {int64_t{1}, int64_t{2}, int64_t{700}}) {
      SCOPED_TRACE(absl::StrCat(NameOf(shape), ", step ", step));
      Held held(shape, Usual(step));
      const Plain plain(held);
      held.Run();
      ExpectClose(held.p, plain.p, "p");
      ExpectClose(held.row, plain.row, "row");
      ExpectClose(held.col, plain.col, "col");
    }
  }
}

TEST(Adafactor, HasTorchsOptions) {
  AdafactorParams params = Usual(3);
  params.eps1 = 0.3, params.eps2 = 5, params.d = 1.5, params.weight_decay = 0, params.beta2_decay = -0.1;
  for (const AdafactorShape& shape : {Matrix(20, 30), Vector(30)}) {
    Held held(shape, params);
    const Plain plain(held);
    held.Run();
    ExpectClose(held.p, plain.p, "p");
    ExpectClose(held.row, plain.row, "row");
  }
}

// The first update weighs the gradient by one: states of before do not count.
TEST(Adafactor, BeginsWithTheFirstGradientAlone) {
  Held held(Matrix(6, 9), Usual()), other(Matrix(6, 9), Usual());
  other.row.assign(other.row.size(), 0), other.col.assign(other.col.size(), 0);
  held.Run();
  other.Run();
  EXPECT_TRUE(held == other);
}

TEST(Adafactor, AGradientOfZerosOnlyDecays) {
  for (const AdafactorShape& shape : {Matrix(5, 9), Vector(9)}) {
    Held held(shape, Usual());
    held.g.assign(held.g.size(), 0), held.row.assign(held.row.size(), 0), held.col.assign(held.col.size(), 0);
    const Held before = held;
    held.Run();
    for (size_t i = 0; i < held.p.size(); ++i) EXPECT_FLOAT_EQ(held.p[i], before.p[i] * 0.995F);
    EXPECT_EQ(held.row, before.row);
  }
}

class AdafactorIsa : public IsaTest {};

// With a log and a cast copy, too.
TEST_P(AdafactorIsa, EveryMachineGivesTheSameBits) {
  for (const AdafactorShape& shape : kShapes) {
    SCOPED_TRACE(NameOf(shape));
    tensor::SetIsaForTest(tensor::Isa::kBase);
    Held want(shape, Usual(4));
    want.Run();
    tensor::SetIsaForTest(GetParam());
    Held got(shape, Usual(4));
    std::vector<uint16_t> cast(got.p.size());
    got.tensor.cast_dst = cast.data(), got.tensor.cast_dtype = v1::DTYPE_BFLOAT16;
    UpdateLog log = {};
    log.Begin(3, 1000);
    got.Run(&log, 1000);
    EXPECT_TRUE(got == want);
    EXPECT_EQ(cast, As16Bit(want.p, v1::DTYPE_BFLOAT16));
    EXPECT_EQ(log.done(3), 1000 + got.states() + shape.numel());
  }
}

SHARDD_FOR_EACH_ISA(AdafactorIsa);

// The machine epsilon is the dtype's, too.
TEST(Adafactor, ALowPrecisionParameterIsRoundedOnce) {
  for (const DType dtype : {v1::DTYPE_BFLOAT16, v1::DTYPE_FLOAT16}) {
    AdafactorParams params = Usual();
    Held held(Matrix(6, 10), params);
    params.eps1 = std::ldexp(1.0, dtype == v1::DTYPE_BFLOAT16 ? -7 : -10);
    Held want(Matrix(6, 10), params);
    std::vector<uint16_t> p = As16Bit(held.p, dtype);
    want.p = AsFloat(p, dtype);
    want.Run();
    held.At().p = p.data();
    held.tensor.param_dtype = dtype;
    for (int64_t item = 0; item < held.items(); ++item) RunAdafactorItem(held.tensor, item);
    EXPECT_EQ(p, As16Bit(want.p, dtype));
  }
}

// Of an update of which so much is done. Where some of the parameter is, its RMS of before is the log's to know.
TEST(Adafactor, TheRestOfAnUpdateHasTheSameBits) {
  for (const AdafactorShape& shape : {Matrix(15, 21), Matrix(3, 7, 5), Vector(300), Matrix(600, 1025)}) {
    Held want(shape, Usual(2));
    const Held before = want;
    UpdateLog log = {};
    log.Begin(1);
    want.Run(&log);
    const int64_t rows = shape.row_numel(), states = want.states();
    for (const int64_t done : {int64_t{0}, rows / 2, rows, states - 1, states, states + 64, states + shape.numel()}) {
      SCOPED_TRACE(absl::StrCat(NameOf(shape), ", ", done, " done"));
      Held held = before;
      std::copy_n(want.row.begin(), std::min(done, rows), held.row.begin());
      std::copy_n(want.col.begin(), std::clamp<int64_t>(done - rows, 0, states - rows), held.col.begin());
      std::copy_n(want.p.begin(), std::max<int64_t>(0, done - states), held.p.begin());
      RunAdafactorFrom(held.At(), done, &log, 0);
      EXPECT_TRUE(held == want);
    }
  }
}

}  // namespace
}  // namespace shardd
