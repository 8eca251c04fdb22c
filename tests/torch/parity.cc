#include "tests/torch/parity.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace shardd_test {
namespace {

using nlohmann::json;

// Largest |got - want| relative to the largest |want|.
double RelativeDifference(const std::vector<double>& got, const std::vector<double>& want) {
  EXPECT_EQ(got.size(), want.size());
  double difference = 0;
  double scale = 1e-30;
  for (size_t i = 0; i < std::min(got.size(), want.size()); ++i) {
    difference = std::max(difference, std::isfinite(got[i]) ? std::abs(got[i] - want[i]) : INFINITY);
    scale = std::max(scale, std::abs(want[i]));
  }
  return difference / scale;
}

}  // namespace

void ExpectParity(const std::vector<json>& sharded, const json& reference, const Tolerance& tolerance) {
  for (size_t rank = 0; rank < sharded.size(); ++rank) {
    const json& result = sharded[rank];
    if (!result.contains("losses")) {
      ADD_FAILURE() << "rank " << rank << " has no result";
      continue;
    }
    const std::vector<double> got = result["losses"];
    const std::vector<double> want = reference["losses"][rank];
    ASSERT_EQ(got.size(), want.size());
    for (size_t step = 0; step < got.size(); ++step) {
      const double allowed = step < tolerance.exact_steps ? tolerance.exact : tolerance.losses;
      ASSERT_NEAR(got[step], want[step], allowed * std::abs(want[step])) << "rank " << rank << " step " << step;
    }
    EXPECT_NEAR(result["evaluation"].get<double>(), reference["evaluation"].get<double>(),
                tolerance.losses * reference["evaluation"].get<double>());
    ASSERT_EQ(result["parameters"].size(), reference["parameters"].size());
    for (const auto& [fqn, values] : reference["parameters"].items()) {
      ASSERT_TRUE(result["parameters"].contains(fqn)) << fqn;
      EXPECT_LE(RelativeDifference(result["parameters"][fqn], values), tolerance.parameters)
          << "rank " << rank << " " << fqn;
    }
  }
}

}  // namespace shardd_test
