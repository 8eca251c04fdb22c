#ifndef SHARDD_SERVER_JOB_WORK_GIVEN_BACK_H_
#define SHARDD_SERVER_JOB_WORK_GIVEN_BACK_H_

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

class CoreLoop;
class Sessions;

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

// Keeps the loop going round every kPoll while it is on: whoever is waited for says so in memory alone. Loop-confined.
class PollTimer {
 public:
  static constexpr absl::Duration kPoll = absl::Microseconds(100);
  explicit PollTimer(CoreLoop* loop) : loop_(loop) {}
  void On();
  void Off();
  void Stop();  // off, and the loop forgets it

 private:
  void Set(bool on);

  CoreLoop* const loop_;
  UniqueFd fd_;  // invalid: there is none, and the loop's own pace has to do
  bool watched_ = false;
  bool on_ = false;
};

// Owns the work that waits for ranks' devices. Loop-confined.
class GivenBack {
 public:
  // All outlive this. `reaper`: frees what was dropped, which holds the memory of sessions.
  GivenBack(const Sessions* sessions, PollTimer* timer, CoreLoop* reaper);

  DoneSignal SignalOf(int rank, uint64_t done) const;
  bool HasCome(const DoneSignal& signal) const;
  bool HaveCome(const std::vector<DoneSignal>& signals) const;

  // Runs `held` when its signals have come and all of its order before it has run: at once where that is so, with its
  // error; else in RunNext.
  absl::Status When(Held held);
  bool empty() const { return held_.empty(); }
  // Runs the first that may; false: none may.
  bool RunNext(absl::Status* status);
  // The epoch has ended: nothing of what waits runs.
  void Drop();

  // A signal that has not come for `limit`; what.empty(): there is none.
  struct Late {
    std::string what;
    DoneSignal signal;
    absl::Duration since;
  };
  Late FindLate(absl::Time now, absl::Duration limit) const;

 private:
  const Sessions* const sessions_;
  PollTimer* const timer_;
  CoreLoop* const reaper_;
  std::list<Held> held_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_WORK_GIVEN_BACK_H_
