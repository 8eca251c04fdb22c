#include <gtest/gtest.h>

#include <cmath>

#include "tests/common/tensor/isa_test_util.h"

namespace shardd {
namespace {

// The tables were made with torch 2.13.0:
//   def values(n, seed): return [((i * 37 + seed * 11) % 41 - 20) / 16 for i in range(n)]
//   p = torch.nn.Parameter(torch.tensor(values(5, 1))); optimizer = torch.optim.AdamW([p], foreach=False, ...)
//   for step in range(3): p.grad = torch.tensor(values(5, 2 + step)); optimizer.step()
// fused=True gives the same digits.
constexpr int kN = 5;

std::vector<float> Values(int64_t n, int seed) {
  std::vector<float> result;
  for (int64_t i = 0; i < n; ++i) result.push_back(static_cast<float>((i * 37 + seed * 11) % 41 - 20) / 16);
  return result;
}

struct AdamWRow {
  double lr, beta1, beta2, eps, weight_decay;
  float want[kN];
};
constexpr AdamWRow kAdamW[] = {
    {1e-2, 0.9, 0.999, 1e-8, 1e-2, {-0.579607725f, -0.815750957f, -1.05741441f, 1.26358902f, 1.02016306f}},
    {0.1, 0.5, 0.75, 1e-3, 0, {-0.713246405f, -0.886909127f, -1.07304096f, 1.32902026f, 1.15103436f}},
    {1e-3, 0.0, 0.95, 1e-6, 0.5, {-0.562687159f, -0.813187838f, -1.06234419f, 1.24766088f, 0.998943865f}},
};

// The same with torch.optim.Adam, whose weight decay goes through the gradient.
constexpr AdamWRow kAdam[] = {
    {1e-2, 0.9, 0.999, 1e-8, 1e-2, {-0.579674423f, -0.815807223f, -1.05730605f, 1.26356816f, 1.02025437f}},
    {0.1, 0.5, 0.75, 1e-3, 0.25, {-0.500144601f, -0.84256947f, -0.985122025f, 1.21525216f, 1.07239687f}},
};

struct SgdRow {
  double lr, momentum, dampening, weight_decay;
  bool nesterov;
  float want[kN];
};
constexpr SgdRow kSgd[] = {
    {0.1, 0, 0, 0, false, {-0.550000012f, -0.981249988f, -1.15625f, 1.23124993f, 1.05624998f}},
    {0.1, 0, 0, 0.25, false, {-0.506210029f, -0.921034217f, -1.07960832f, 1.13689458f, 0.978320301f}},
    {0.1, 0.9, 0, 0, false, {-0.644500017f, -1.01050007f, -1.12024987f, 1.33249998f, 1.22274995f}},
    {0.05, 0.9, 0.5, 0.1, false, {-0.579688907f, -0.836699069f, -1.02964687f, 1.28674316f, 1.09379542f}},
    {0.05, 0.8, 0, 0.1, true, {-0.563459456f, -0.946019113f, -1.09795368f, 1.22123253f, 1.06929779f}},
};

class UpdateTest : public IsaTest {};

TEST_P(UpdateTest, AdamWGivesPyTorchsParameters) {
  for (const AdamWRow& row : kAdamW) {
    std::vector<float> p = Values(kN, 1), m(kN), v(kN);
    for (int step = 1; step <= 3; ++step) {
      const std::vector<float> g = Values(kN, 1 + step);
      AdamWUpdate({row.lr, row.beta1, row.beta2, row.eps, row.weight_decay, step, 1}, p.data(), v1::DTYPE_FLOAT32,
                  g.data(), m.data(), v.data(), nullptr, v1::DTYPE_UNSPECIFIED, kN);
    }
    for (int i = 0; i < kN; ++i) EXPECT_NEAR(p[i], row.want[i], 3e-7f * std::fabs(row.want[i])) << "lr " << row.lr;
  }
}

TEST_P(UpdateTest, AdamGivesPyTorchsParameters) {
  for (const AdamWRow& row : kAdam) {
    std::vector<float> p = Values(kN, 1), m(kN), v(kN);
    for (int step = 1; step <= 3; ++step) {
      const std::vector<float> g = Values(kN, 1 + step);
      AdamWUpdate({row.lr, row.beta1, row.beta2, row.eps, row.weight_decay, step, 1, /*coupled_decay=*/true}, p.data(),
                  v1::DTYPE_FLOAT32, g.data(), m.data(), v.data(), nullptr, v1::DTYPE_UNSPECIFIED, kN);
    }
    for (int i = 0; i < kN; ++i) EXPECT_NEAR(p[i], row.want[i], 3e-7f * std::fabs(row.want[i])) << "lr " << row.lr;
  }
}

TEST_P(UpdateTest, SgdGivesPyTorchsParameters) {
  for (const SgdRow& row : kSgd) {
    // The buffer starts with what an earlier owner of the memory left: a first step must not read it.
    std::vector<float> p = Values(kN, 1), buffer(kN, NAN);
    for (int step = 1; step <= 3; ++step) {
      const std::vector<float> g = Values(kN, 1 + step);
      SgdUpdate({row.lr, row.momentum, row.dampening, row.weight_decay, row.nesterov, step == 1, 1}, p.data(),
                v1::DTYPE_FLOAT32, g.data(), row.momentum == 0 ? nullptr : buffer.data(), nullptr,
                v1::DTYPE_UNSPECIFIED, kN);
    }
    for (int i = 0; i < kN; ++i) EXPECT_NEAR(p[i], row.want[i], 3e-7f * std::fabs(row.want[i])) << "lr " << row.lr;
  }
}

struct AdamWState {
  explicit AdamWState(int64_t n) : p(Randoms(n, 1)), g(Randoms(n, 2)), m(Randoms(n, 3)), v(Randoms(n, 4)) {
    for (float& x : v) x *= x;
  }
  std::vector<float> p, g, m, v;
};
constexpr AdamWParams kParams = {1e-3, 0.9, 0.95, 1e-8, 0.1, 7, 0.25};

TEST_P(UpdateTest, AdamWAgreesWithTheFormulaInDouble) {
  const int64_t n = 5000;
  AdamWState s(n);
  const AdamWState before = s;
  AdamWUpdate(kParams, s.p.data(), v1::DTYPE_FLOAT32, s.g.data(), s.m.data(), s.v.data(), nullptr,
              v1::DTYPE_UNSPECIFIED, n);
  for (int64_t i = 0; i < n; ++i) {
    const double g = before.g[i] * kParams.grad_scale;
    const double m = before.m[i] + (1 - kParams.beta1) * (g - before.m[i]);
    const double v = kParams.beta2 * before.v[i] + (1 - kParams.beta2) * g * g;
    const double denominator = std::sqrt(v) / std::sqrt(1 - std::pow(kParams.beta2, 7)) + kParams.eps;
    const double p = before.p[i] * (1 - kParams.lr * kParams.weight_decay) -
                     kParams.lr / (1 - std::pow(kParams.beta1, 7)) * m / denominator;
    ASSERT_NEAR(s.p[i], p, 3e-7 * (std::fabs(p) + 0.01)) << i;
    ASSERT_NEAR(s.m[i], m, 3e-7 * (std::fabs(m) + 0.1)) << i;
    ASSERT_NEAR(s.v[i], v, 3e-7 * v) << i;
  }
}

// Shard boundaries and machine types must be invisible: the same bits in pieces, unaligned, and on the base level.
TEST_P(UpdateTest, AdamWGivesTheSameBitsInPiecesAndEverywhere) {
  const int64_t n = 4099;
  AdamWState whole(n), pieces(n);
  AdamWUpdate(kParams, whole.p.data(), v1::DTYPE_FLOAT32, whole.g.data(), whole.m.data(), whole.v.data(), nullptr,
              v1::DTYPE_UNSPECIFIED, n);
  tensor::SetIsaForTest(tensor::Isa::kBase);
  for (int64_t i = 0; i < n; i += 37) {
    AdamWUpdate(kParams, pieces.p.data() + i, v1::DTYPE_FLOAT32, pieces.g.data() + i, pieces.m.data() + i,
                pieces.v.data() + i, nullptr, v1::DTYPE_UNSPECIFIED, std::min<int64_t>(37, n - i));
  }
  EXPECT_TRUE(whole.p == pieces.p);
  EXPECT_TRUE(whole.m == pieces.m);
  EXPECT_TRUE(whole.v == pieces.v);
}

TEST_P(UpdateTest, LowPrecisionParametersAreComputedInFp32AndRoundedOnce) {
  const int64_t n = 3001;
  for (DType dtype : {v1::DTYPE_BFLOAT16, v1::DTYPE_FLOAT16}) {
    AdamWState wide(n), narrow(n);
    std::vector<uint16_t> p = As16Bit(narrow.p, dtype);
    wide.p = AsFloat(p, dtype);
    AdamWUpdate(kParams, wide.p.data(), v1::DTYPE_FLOAT32, wide.g.data(), wide.m.data(), wide.v.data(), nullptr,
                v1::DTYPE_UNSPECIFIED, n);
    AdamWUpdate(kParams, p.data(), dtype, narrow.g.data(), narrow.m.data(), narrow.v.data(), nullptr,
                v1::DTYPE_UNSPECIFIED, n);
    EXPECT_TRUE(p == As16Bit(wide.p, dtype)) << DTypeName(dtype);
    EXPECT_TRUE(wide.v == narrow.v);

    std::vector<uint16_t> q = As16Bit(narrow.g, dtype);
    std::vector<float> wide_q = AsFloat(q, dtype);
    const SgdParams sgd = {0.1, 0, 0, 0.1, false, false, 1};
    SgdUpdate(sgd, wide_q.data(), v1::DTYPE_FLOAT32, narrow.g.data(), nullptr, nullptr, v1::DTYPE_UNSPECIFIED, n);
    SgdUpdate(sgd, q.data(), dtype, narrow.g.data(), nullptr, nullptr, v1::DTYPE_UNSPECIFIED, n);
    EXPECT_TRUE(q == As16Bit(wide_q, dtype)) << DTypeName(dtype);
  }
}

// Small: in one go; large: streamed, with an unaligned destination.
TEST_P(UpdateTest, TheCastCopyIsTheRoundedNewParameter) {
  for (int64_t n : {1, 1500, 1'200'001}) {
    for (DType cast : {v1::DTYPE_BFLOAT16, v1::DTYPE_FLOAT16}) {
      AdamWState with(n), without(n);
      std::vector<uint16_t> copy(static_cast<size_t>(n + 2), 0xabcd);
      AdamWUpdate(kParams, with.p.data(), v1::DTYPE_FLOAT32, with.g.data(), with.m.data(), with.v.data(),
                  copy.data() + 1, cast, n);
      AdamWUpdate(kParams, without.p.data(), v1::DTYPE_FLOAT32, without.g.data(), without.m.data(), without.v.data(),
                  nullptr, v1::DTYPE_UNSPECIFIED, n);
      EXPECT_TRUE(with.p == without.p && with.m == without.m && with.v == without.v) << n;
      EXPECT_EQ(copy.front(), 0xabcd);
      EXPECT_EQ(copy.back(), 0xabcd);
      EXPECT_TRUE(std::vector<uint16_t>(copy.begin() + 1, copy.end() - 1) == As16Bit(with.p, cast)) << n;

      const SgdParams sgd = {0.1, 0.9, 0, 0, false, false, 1};
      SgdUpdate(sgd, with.p.data(), v1::DTYPE_FLOAT32, with.g.data(), with.m.data(), copy.data() + 1, cast, n);
      EXPECT_TRUE(std::vector<uint16_t>(copy.begin() + 1, copy.end() - 1) == As16Bit(with.p, cast)) << n;
    }
  }
}

TEST_P(UpdateTest, GradScaleIsAppliedBeforeEverythingElse) {
  AdamWState scaled(100), plain(100);
  for (float& g : plain.g) g *= 0.25f;
  AdamWParams no_scale = kParams;
  no_scale.grad_scale = 1;
  AdamWUpdate(kParams, scaled.p.data(), v1::DTYPE_FLOAT32, scaled.g.data(), scaled.m.data(), scaled.v.data(), nullptr,
              v1::DTYPE_UNSPECIFIED, 100);
  AdamWUpdate(no_scale, plain.p.data(), v1::DTYPE_FLOAT32, plain.g.data(), plain.m.data(), plain.v.data(), nullptr,
              v1::DTYPE_UNSPECIFIED, 100);
  EXPECT_TRUE(scaled.p == plain.p);
  EXPECT_TRUE(scaled.v == plain.v);
}

SHARDD_FOR_EACH_ISA(UpdateTest);

}  // namespace
}  // namespace shardd
