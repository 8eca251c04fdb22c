#include "common/clock/timed_condition.h"

#include <algorithm>
#include <chrono>

namespace shardd {
namespace {

// The C++ library adds what it is given to a moment, which must not overflow.
constexpr absl::Duration kLongestSleep = absl::Hours(1);

// A mutex as the C++ library calls it.
class LockedMutex {
 public:
  explicit LockedMutex(absl::Mutex* mutex) : mutex_(mutex) {}
  void lock() ABSL_NO_THREAD_SAFETY_ANALYSIS { mutex_->Lock(); }
  void unlock() ABSL_NO_THREAD_SAFETY_ANALYSIS { mutex_->Unlock(); }

 private:
  absl::Mutex* const mutex_;
};

}  // namespace

bool TimedCondition::Await(absl::Mutex* mutex, absl::FunctionRef<bool()> done, Deadline deadline) {
  LockedMutex locked(mutex);
  while (!done()) {
    const absl::Duration left = deadline.Left();
    if (left <= absl::ZeroDuration()) {
      return false;
    }
    changed_.wait_for(locked, absl::ToChronoNanoseconds(std::min(left, kLongestSleep)));
  }
  return true;
}

}  // namespace shardd
