#ifndef SHARDD_TESTS_COMMON_PLAN_PROPERTY_FIXTURE_H_
#define SHARDD_TESTS_COMMON_PLAN_PROPERTY_FIXTURE_H_

// What must hold of every plan, over random trees. Each case names its seed; RandomSpec(seed), CutAfterForward
// and MixPrecision repeat it.

#include <vector>

#include "tests/common/plan/random_spec.h"

namespace shardd {

inline constexpr uint32_t kSeeds = 1500;

class Property : public ::testing::Test {
 protected:
  // Calls check(spec, plan) for every seed.
  template <typename Check>
  void ForAll(Check check) {
    for (uint32_t seed = 1; seed <= kSeeds && !HasFatalFailure(); ++seed) {
      SCOPED_TRACE(::testing::Message() << "seed " << seed);
      RandomSpec random(seed);
      random.CutAfterForward();
      random.MixPrecision();
      const absl::StatusOr<ShardPlan> plan = PlanShards(random.spec());
      ASSERT_TRUE(plan.ok()) << plan.status();
      check(random.spec(), *plan);
    }
  }
};

// How often each element of a flat parameter is claimed, by segments(plan, flat_param, rank).
template <typename Segments>
std::vector<int> Claims(const ShardPlan& plan, int flat_param, Segments segments) {
  std::vector<int> claims(plan.flat_params[flat_param].padded_numel, 0);
  for (int rank = 0; rank < plan.world_size; ++rank) {
    int64_t end = 0;
    for (const Segment& segment : segments(plan, flat_param, rank)) {
      EXPECT_GT(segment.numel, 0);
      EXPECT_GE(segment.offset, end) << "segments must be in offset order";
      end = segment.offset + segment.numel;
      const ParamPlan& param = plan.params[segment.param];
      EXPECT_EQ(param.flat_param, flat_param);
      EXPECT_GE(segment.offset, param.offset);
      EXPECT_LE(end, param.offset + param.numel);
      for (int64_t i = segment.offset; i < end; ++i) {
        ++claims[i];
      }
    }
  }
  return claims;
}

inline std::vector<int> ExpectedClaims(const ShardPlan& plan, int flat_param, int per_element) {
  std::vector<int> claims(plan.flat_params[flat_param].padded_numel, 0);
  for (int p : plan.flat_params[flat_param].params) {
    for (int64_t i = 0; i < plan.params[p].numel; ++i) {
      claims[plan.params[p].offset + i] = per_element;
    }
  }
  return claims;
}

}  // namespace shardd

#endif  // SHARDD_TESTS_COMMON_PLAN_PROPERTY_FIXTURE_H_
