#ifndef SHARDD_TESTS_SERVER_COLLECTIVE_NODES_CALL_RESULT_H_
#define SHARDD_TESTS_SERVER_COLLECTIVE_NODES_CALL_RESULT_H_

#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "tests/testing/poll.h"

namespace shardd::testing {

// The result of an asynchronous call, which comes once. It outlives the call. Thread-safe.
class CallResult {
 public:
  std::function<void(absl::Status)> Done() {
    return [this](absl::Status status) {
      absl::MutexLock lock(&mutex_);
      EXPECT_FALSE(status_.has_value()) << "told twice";
      status_ = std::move(status);
    };
  }
  bool done() const {
    absl::MutexLock lock(&mutex_);
    return status_.has_value();
  }
  // DEADLINE_EXCEEDED where it is not told.
  absl::Status Wait() const {
    absl::MutexLock lock(&mutex_);
    const auto told = [this] { return status_.has_value(); };
    return mutex_.AwaitWithTimeout(absl::Condition(&told), kLimit) ? *status_ : absl::DeadlineExceededError("not told");
  }

 private:
  mutable absl::Mutex mutex_;
  std::optional<absl::Status> status_;
};

}  // namespace shardd::testing

#endif  // SHARDD_TESTS_SERVER_COLLECTIVE_NODES_CALL_RESULT_H_
