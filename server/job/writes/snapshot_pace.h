#ifndef SHARDD_SERVER_JOB_WRITES_SNAPSHOT_PACE_H_
#define SHARDD_SERVER_JOB_WRITES_SNAPSHOT_PACE_H_

#include <algorithm>

#include "absl/time/time.h"

namespace shardd {

// When a snapshot is due where the job does not say how often (ShardPlan.snapshots_by_cost): with every pass, as long
// as that is cheap, else as often as it stays so. A snapshot has two parts. Ranks wait while the one is copied, which
// may take kShare of the time. The other is copied while they compute, so it costs them a wait only where a step is
// over before the copy is, and a core only where none is idle; it may take kBehindShare.
class SnapshotPace {
 public:
  static constexpr double kShare = 0.03;
  static constexpr double kBehindShare = 0.5;

  bool IsDue(absl::Time now) const {
    return (now - ended_) * kShare >= waited_.cost && (now - began_) * kBehindShare >= behind_.cost;
  }
  // Ranks begin to wait.
  void Began(absl::Time now) { began_ = now; }
  // They go on. A job's first snapshots do not count: memory that nobody has touched is slow, and the start of training
  // would be exposed to the loss of many steps.
  void Ended(absl::Time now) {
    ended_ = now;
    ++taken_;
    if (taken_ > kFirst) waited_.Took(now - began_);
  }
  // What has been copied since they went on is whole, too.
  void EndedBehind(absl::Time now) {
    if (taken_ > kFirst) behind_.Took(now - ended_);
  }

 private:
  static constexpr int kFirst = 2;

  // A rare delay (the machine was busy) must not make snapshots rare: the cost grows by so much from one to the next at
  // most. What runs behind is delayed more often, by whatever else the cores do.
  struct Cost {
    double most_growth;
    absl::Duration cost = absl::ZeroDuration();
    void Took(absl::Duration took) { cost = cost == absl::ZeroDuration() ? took : std::min(took, most_growth * cost); }
  };
  absl::Time began_ = absl::InfinitePast();
  absl::Time ended_ = absl::InfinitePast();
  Cost waited_{2};
  Cost behind_{1.25};
  int taken_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_WRITES_SNAPSHOT_PACE_H_
