#ifndef SHARDD_SERVER_JOB_WRITES_SNAPSHOT_PACE_H_
#define SHARDD_SERVER_JOB_WRITES_SNAPSHOT_PACE_H_

#include <algorithm>

#include "absl/time/time.h"

namespace shardd {

// When a snapshot is due where the job does not say how often (ShardPlan.snapshots_by_cost): with every pass, as long
// as that takes no more than a small share of the time, else as often as keeps it to that share. Ranks wait while a
// snapshot is taken, so the time that it takes is what it costs them.
class SnapshotPace {
 public:
  static constexpr double kShare = 0.03;

  bool IsDue(absl::Time now) const { return (now - ended_) * kShare >= cost_; }
  void Began(absl::Time now) { began_ = now; }
  // A rare delay (the machine was busy) must not make snapshots rare: the cost at most doubles from one to the next.
  void Ended(absl::Time now) {
    const absl::Duration took = now - began_;
    cost_ = cost_ == absl::ZeroDuration() ? took : std::min(took, 2 * cost_);
    ended_ = now;
  }

 private:
  absl::Time began_ = absl::InfinitePast();
  absl::Time ended_ = absl::InfinitePast();
  absl::Duration cost_ = absl::ZeroDuration();
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_WRITES_SNAPSHOT_PACE_H_
