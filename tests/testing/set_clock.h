#ifndef SHARDD_TESTS_TESTING_SET_CLOCK_H_
#define SHARDD_TESTS_TESTING_SET_CLOCK_H_

#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/testing/build_paths.h"
#include "tests/testing/sanitizers.h"

namespace shardd::testing {

// What makes a process that is started with it find its wall clock an hour "back" or "forward" at each look
// (tests/fakes/clock). gRPC's pool, whose waits then end at once, says so each time: not here.
inline std::vector<std::string> SetClockEnvironment(const std::string& direction) {
  return {"LD_PRELOAD=" + built::kFakesDir + "/libset_clock.so", "SHARDD_TEST_CLOCK=" + direction,
          "GRPC_VERBOSITY=NONE"};
}

}  // namespace shardd::testing

// At the beginning of a case that uses it.
#define SHARDD_NEEDS_SET_CLOCK()                                                                        \
  if (::shardd::testing::kSanitized) GTEST_SKIP() << "a sanitizer's runtime must be the first library"; \
  static_assert(true, "")

#endif  // SHARDD_TESTS_TESTING_SET_CLOCK_H_
