#ifndef SHARDD_COMMON_CLOCK_TIMED_CONDITION_H_
#define SHARDD_COMMON_CLOCK_TIMED_CONDITION_H_

#include <condition_variable>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"
#include "common/clock/deadline.h"

namespace shardd {

// Waits with a deadline for what a mutex guards. In the place of absl::Mutex::AwaitWithTimeout and its like, which
// sleep until a moment of the wall clock (absl 20220623): where the clock is set back by an hour meanwhile, a wait of
// 50 ms lasts for an hour. The price: whoever changes what is waited for says so. Thread-safe.
class TimedCondition {
 public:
  // Waits until `done` holds; returns false if it does not at `deadline`. `done` is called with the mutex locked.
  bool Await(absl::Mutex* mutex, absl::FunctionRef<bool()> done, Deadline deadline)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // Has all waiters look again. Call it with the mutex locked, or they may be gone.
  void NotifyAll() { changed_.notify_all(); }

 private:
  std::condition_variable_any changed_;
};

}  // namespace shardd

#endif  // SHARDD_COMMON_CLOCK_TIMED_CONDITION_H_
