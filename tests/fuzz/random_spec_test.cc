// The same check as plan_fuzz.cc on specs that are nearly right: a good one with a few random changes. Fixed seeds.

#include <random>

#include "google/protobuf/stubs/logging.h"
#include "gtest/gtest.h"
#include "tests/fuzz/spec_input.h"

namespace shardd::fuzz {
namespace {

TEST(RandomSpec, GivesAnErrorOrAPlanCoveringEveryElementOnce) {
  int planned = 0;
  for (uint32_t seed = 0; seed < 4000; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    SpecMaker maker([&random] { return static_cast<uint32_t>(random()); });
    v1::JobSpec spec = maker.Make();
    for (int changes = maker.Below(3); changes > 0; --changes) maker.Change(spec);
    planned += CheckPlanOf(spec) ? 1 : 0;
  }
  EXPECT_GT(planned, 400);  // both outcomes occur often, or this checks nothing
  EXPECT_LT(planned, 3900);
}

TEST(RandomSpec, RandomBytesThatParseGiveAPlanOrAnError) {
  const google::protobuf::LogSilencer quiet;  // names that are no UTF-8
  std::mt19937 random(7);
  for (int round = 0; round < 4000; ++round) {
    SpecMaker maker([&random] { return static_cast<uint32_t>(random()); });
    std::string bytes = maker.Make().SerializeAsString();
    for (int flips = 1 + round % 5; flips > 0; --flips) bytes[random() % bytes.size()] = static_cast<char>(random());
    v1::JobSpec spec;
    if (spec.ParseFromString(bytes)) CheckPlanOf(spec);
  }
}

}  // namespace
}  // namespace shardd::fuzz
