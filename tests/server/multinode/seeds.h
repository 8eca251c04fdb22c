#ifndef SHARDD_TESTS_SERVER_MULTINODE_SEEDS_H_
#define SHARDD_TESTS_SERVER_MULTINODE_SEEDS_H_

#include <cstdint>

#include "tests/testing/sanitizers.h"

namespace shardd::testing {

// From one seed to the next. A sanitizer finds in a ninth of the schedules what it would find in all; what they are to
// reach together is for runs without one.
inline constexpr uint64_t kSeedStride = kSanitized ? 9 : 1;
// What all schedules together exceed: `count`; less than nothing where not all of them run.
constexpr int InAll(int count) { return kSanitized ? -1 : count; }

}  // namespace shardd::testing

#endif  // SHARDD_TESTS_SERVER_MULTINODE_SEEDS_H_
