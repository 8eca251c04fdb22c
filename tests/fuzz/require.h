#ifndef SHARDD_TESTS_FUZZ_REQUIRE_H_
#define SHARDD_TESTS_FUZZ_REQUIRE_H_

#include <cstdio>
#include <cstdlib>

// Ends the process where `condition` does not hold, which libFuzzer counts as a finding.
#define REQUIRE(condition)                                                 \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                        \
    }                                                                      \
  } while (false)

#endif  // SHARDD_TESTS_FUZZ_REQUIRE_H_
