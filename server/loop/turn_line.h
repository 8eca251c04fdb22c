#ifndef SHARDD_SERVER_LOOP_TURN_LINE_H_
#define SHARDD_SERVER_LOOP_TURN_LINE_H_

#include <cstddef>
#include <deque>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/time/time.h"
#include "common/clock/monotonic_now.h"

namespace shardd {

// What of one job waits for the loop, in the order in which it came. Thread-compatible.
template <typename T>
class TurnLine {
 public:
  void Add(T one) { line_.push_back(std::move(one)); }
  bool empty() const { return line_.empty(); }
  // Hands the first over, and others as long as it is before `until`, each once at most: what `take` adds comes behind
  // those that wait, and has its turn in another call. Returns whether there was one.
  bool Take(absl::Time until, absl::FunctionRef<void(T one)> take) {
    const bool any = !line_.empty();
    for (size_t left = line_.size(); left > 0; --left) {
      T one = std::move(line_.front());
      line_.pop_front();
      take(std::move(one));
      if (MonotonicNow() >= until) break;
    }
    return any;
  }
  std::deque<T> TakeAll() { return std::exchange(line_, {}); }

 private:
  std::deque<T> line_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_LOOP_TURN_LINE_H_
