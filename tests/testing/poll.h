#ifndef SHARDD_TESTS_TESTING_POLL_H_
#define SHARDD_TESTS_TESTING_POLL_H_

#include <poll.h>

#include <functional>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace shardd::testing {

// Longer than anything takes on a busy machine with sanitizers; only a hang gets there.
inline constexpr absl::Duration kLimit = absl::Seconds(60);

// False when `condition` still does not hold after `limit`.
inline bool PollUntil(const std::function<bool()>& condition, absl::Duration limit = kLimit) {
  for (const absl::Time end = absl::Now() + limit; absl::Now() < end; absl::SleepFor(absl::Milliseconds(1))) {
    if (condition()) {
      return true;
    }
  }
  return condition();
}

// The same of a descriptor that can be read, or has been hung up.
inline bool Readable(int fd, absl::Duration limit = kLimit) {
  pollfd entry = {.fd = fd, .events = POLLIN, .revents = 0};
  return poll(&entry, 1, static_cast<int>(absl::ToInt64Milliseconds(limit))) == 1;
}

}  // namespace shardd::testing

#endif  // SHARDD_TESTS_TESTING_POLL_H_
