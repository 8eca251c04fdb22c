#ifndef SHARDD_SERVER_JOB_GIVEN_BACK_H_
#define SHARDD_SERVER_JOB_GIVEN_BACK_H_

// Memory that ranks give back before their GPUs have done with it: what is to read it or write it next waits until the
// ranks' `done` words have come to the signals that their records name (common/shm/ring.h).
//
// The wait is the host's: nothing is submitted to a device before all of it may run, so no wait of a rank's is ever in
// a queue of the daemon's devices, which other jobs share, and nothing there can be let go by an epoch. The words are
// looked at when the loop runs anyway, and every kPoll while somebody waits. It ends, because a signal is enqueued
// before its record is published, and a program's stream waits for nothing that is not under way by then.

#include <cstdint>
#include <list>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/shm/unique_fd.h"

namespace shardd {

// A signal of one session's device. The rank's next session, or none, waits for nothing.
struct DoneSignal {
  int rank = 0;
  uint64_t session_id = 0;
  uint64_t done = 0;
};

// Work that waits. Of one order, each runs behind the one before it.
struct Held {
  enum class Order { kGradients, kDecisions, kFills };
  Order order = Order::kFills;
  std::string what;  // "reduce layers.3 step 12"
  std::vector<DoneSignal> signals;
  absl::Time since = absl::InfinitePast();
  absl::AnyInvocable<absl::Status()> run;
  absl::AnyInvocable<void()> dropped;  // instead of `run` where the epoch ends first; may be null
};

// A descriptor that becomes readable every kPoll while it is on. Loop-confined.
class PollTimer {
 public:
  static constexpr absl::Duration kPoll = absl::Microseconds(100);
  // -1: there is none, and the loop's own pace has to do.
  int fd();
  void Set(bool on);
  void Clear();  // what has expired

 private:
  UniqueFd fd_;
  bool on_ = false;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_GIVEN_BACK_H_
