#ifndef SHARDD_SERVER_DAEMON_EARLY_REFUSALS_H_
#define SHARDD_SERVER_DAEMON_EARLY_REFUSALS_H_

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/clock/monotonic_now.h"
#include "server/tenant/tenant.h"

namespace shardd {

// Ranks that were refused for good before their job was there: whoever makes the job within half a minute would wait
// for them in vain. Holds at most kMost of all users together. Loop-confined.
class EarlyRefusals {
 public:
  static constexpr size_t kMost = 256;
  struct Refusal {
    int rank;
    absl::Status status;
    uint64_t ticks;  // when, as TicksSinceBoot
  };

  // `now` as MonotonicNow. Nothing happens where the status is not final (IsFinalRefusal) or the rank is below 0. The
  // one before of the rank is forgotten, and the oldest of the user where there are too many.
  void Add(const std::string& job, const Tenant& caller, Refusal refusal, absl::Time now);
  // Those of a job that `owner` makes now, of callers that it admits; they are forgotten here.
  std::vector<Refusal> Take(const std::string& job, const Tenant& owner, absl::Time now);

 private:
  struct Entry {
    std::string job;
    Tenant caller;
    Refusal refusal;
    absl::Time time;
  };
  void DropOld(absl::Time now);
  std::deque<Entry> entries_;  // oldest first
};

}  // namespace shardd

#endif  // SHARDD_SERVER_DAEMON_EARLY_REFUSALS_H_
