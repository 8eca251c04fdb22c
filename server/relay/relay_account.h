#ifndef SHARDD_SERVER_RELAY_RELAY_ACCOUNT_H_
#define SHARDD_SERVER_RELAY_RELAY_ACCOUNT_H_

#include <algorithm>

#include "absl/time/time.h"

namespace shardd {

// A budget of processor time that refills at `rate` seconds per second, up to `burst`. It may be overdrawn, because a
// frame cannot be divided. Thread-compatible.
class RelayAccount {
 public:
  RelayAccount(double rate, absl::Duration burst, absl::Time now)
      : rate_(rate), burst_(burst), credit_(burst), at_(now) {}
  absl::Duration Credit(absl::Time now) {
    credit_ = std::min(burst_, credit_ + std::max(absl::ZeroDuration(), now - at_) * rate_);
    at_ = now;
    return credit_;
  }
  void Pay(absl::Duration price) { credit_ -= price; }
  // Time until there is credit again.
  absl::Duration Pause() const { return credit_ > absl::ZeroDuration() ? absl::ZeroDuration() : -credit_ / rate_; }

 private:
  const double rate_;
  const absl::Duration burst_;
  absl::Duration credit_;
  absl::Time at_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_RELAY_RELAY_ACCOUNT_H_
