// Norms of any order against long double arithmetic, where sums of powers in float would overflow or vanish.

#include "common/tensor/norm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "common/tensor/kernels.h"
#include "tests/common/tensor/isa_test_util.h"

namespace shardd {
namespace {

const double kInfinity = std::numeric_limits<double>::infinity();
const std::vector<double> kOrders = {0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 30.25, kInfinity};

long double Want(const std::vector<float>& values, double order) {
  long double largest = 0, sum = 0;
  for (float x : values) largest = std::max(largest, std::abs(static_cast<long double>(x)));
  if (std::isinf(order) || largest == 0) return largest;
  for (float x : values)
    sum += std::pow(std::abs(static_cast<long double>(x)) / largest, static_cast<long double>(order));
  return largest * std::pow(sum, 1 / static_cast<long double>(order));
}

double Got(const std::vector<float>& values, double order) {
  Norm norm(order);
  norm.Add(values.data(), static_cast<int64_t>(values.size()));
  return norm.value();
}

class NormTest : public IsaTest {};

TEST_P(NormTest, EveryOrderIsExactEnough) {
  for (int64_t numel : {1, 31, 33, 4096, 4097, 20'003}) {
    const std::vector<float> values = Randoms(numel, 5);
    for (double order : kOrders) {
      const double want = static_cast<double>(Want(values, order));
      EXPECT_NEAR(Got(values, order), want, 1e-12 * want) << "order " << order << " numel " << numel;
    }
  }
}

TEST_P(NormTest, PiecesGiveWhatTheWholeGives) {
  const std::vector<float> values = Randoms(10'000, 6);
  for (double order : kOrders) {
    Norm first(order), second(order), total(order);
    first.Add(values.data(), 7000);
    second.Add(values.data() + 7000, 3000);
    total.Add(first);
    total.Add(second);
    const double want = static_cast<double>(Want(values, order));
    EXPECT_NEAR(total.value(), want, 1e-12 * want) << order;
  }
}

TEST_P(NormTest, LargeAndSmallNumbersNeitherOverflowNorVanish) {
  for (float x : {1e-40f, 1e-30f, 1e30f, 3e38f}) {
    const std::vector<float> values(10, x);
    for (double order : kOrders) {
      const double want = static_cast<double>(Want(values, order));
      EXPECT_NEAR(Got(values, order), want, 1e-10 * want) << x << " order " << order;
    }
  }
  const std::vector<float> mixed = {1e-30f, 1e30f, 1e-30f};
  EXPECT_NEAR(Got(mixed, 5), 1e30, 1e24);
}

TEST_P(NormTest, NothingAndZerosAreZero) {
  for (double order : kOrders) {
    EXPECT_EQ(Norm(order).value(), 0) << order;
    EXPECT_EQ(Got(std::vector<float>(5000, -0.0f), order), 0) << order;
  }
}

TEST_P(NormTest, NonFiniteElementShowsWhereverItIsAndNanWins) {
  for (double order : kOrders) {
    for (size_t at : {0u, 40u, 4999u}) {
      std::vector<float> values(5000, 1.0f);
      values[at] = -INFINITY;
      EXPECT_EQ(Got(values, order), kInfinity) << order << " at " << at;
      values[at == 0 ? 4500 : 0] = NAN;
      EXPECT_TRUE(std::isnan(Got(values, order))) << order << " at " << at;
    }
  }
}

TEST_P(NormTest, SumsOfPowersAreTheSameOnEveryMachine) {
  const std::vector<float> values = Randoms(5000, 7);
  for (double order : {1.0, 2.0, 3.0, 4.0, kInfinity}) {
    const double got = Got(values, order);
    tensor::SetIsaForTest(tensor::Isa::kBase);
    EXPECT_EQ(Got(values, order), got) << order;
    tensor::SetIsaForTest(GetParam());
  }
}

TEST(NormOrder, IsAnyNumberAboveZero) {
  for (double order : kOrders) EXPECT_TRUE(Norm::IsOrder(order)) << order;
  for (double order : {0.0, -1.0, -kInfinity, std::nan("")}) EXPECT_FALSE(Norm::IsOrder(order)) << order;
}

SHARDD_FOR_EACH_ISA(NormTest);

}  // namespace
}  // namespace shardd
