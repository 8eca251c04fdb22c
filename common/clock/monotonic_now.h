#ifndef SHARDD_COMMON_CLOCK_MONOTONIC_NOW_H_
#define SHARDD_COMMON_CLOCK_MONOTONIC_NOW_H_

#include "absl/time/time.h"

namespace shardd {

// For leases, deadlines and timers: not moved by whoever sets the clock. Comparable only with itself.
absl::Time MonotonicNow();

}  // namespace shardd

#endif  // SHARDD_COMMON_CLOCK_MONOTONIC_NOW_H_
