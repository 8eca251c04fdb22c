#ifndef SHARDD_TESTS_TESTING_LONG_RUN_H_
#define SHARDD_TESTS_TESTING_LONG_RUN_H_

#include <cstdlib>

namespace shardd::testing {

// A number that makes a test longer or other than in CI: the variable's (SHARDD_DEATHS=250), else `in_ci`.
inline int LongRun(const char* variable, int in_ci) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? in_ci : std::atoi(text);
}

}  // namespace shardd::testing

#endif  // SHARDD_TESTS_TESTING_LONG_RUN_H_
