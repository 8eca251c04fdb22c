#ifndef SHARDD_COMMON_CLOCK_DEADLINE_H_
#define SHARDD_COMMON_CLOCK_DEADLINE_H_

#include <algorithm>

#include "absl/time/time.h"
#include "common/clock/monotonic_now.h"

namespace shardd {

// The moment at which a wait ends, by MonotonicNow: a clock that is set neither ends the wait nor makes it longer.
// A type of its own, so that no moment of the wall clock can take its place. Immutable.
class Deadline {
 public:
  // `limit` from now; absl::InfiniteDuration() for never.
  static Deadline In(absl::Duration limit) { return Deadline(MonotonicNow() + limit); }
  static Deadline Never() { return Deadline(absl::InfiniteFuture()); }

  bool HasPassed() const { return MonotonicNow() >= at_; }
  // Zero once it has passed.
  absl::Duration Left() const { return std::max(at_ - MonotonicNow(), absl::ZeroDuration()); }

  // The earlier one is the lesser one.
  friend bool operator<(const Deadline& a, const Deadline& b) { return a.at_ < b.at_; }

 private:
  explicit Deadline(absl::Time at) : at_(at) {}

  absl::Time at_;  // of MonotonicNow
};

}  // namespace shardd

#endif  // SHARDD_COMMON_CLOCK_DEADLINE_H_
