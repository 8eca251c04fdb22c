#include "common/clock/monotonic_now.h"

#include <time.h>

namespace shardd {

absl::Time MonotonicNow() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return absl::TimeFromTimespec(now);
}

}  // namespace shardd
