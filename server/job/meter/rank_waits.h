#ifndef SHARDD_SERVER_JOB_METER_RANK_WAITS_H_
#define SHARDD_SERVER_JOB_METER_RANK_WAITS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/time/time.h"
#include "common/clock/monotonic_now.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

// Which rank waited for which, and for how long. Two kinds of waits are seen: where all ranks do something together,
// each waits for the one that comes last; and who sleeps until its gradient slot is released waits for the rank whose
// command releases it. `now` is MonotonicNow, and never goes back. Nothing is allocated after construction.
// Loop-confined.
class RankWaits {
 public:
  // With more ranks there are no pairs: who waited is not told apart.
  static constexpr int kMostInPairs = 12;
  // Ranks from here on are awaited as one.
  static constexpr int kMostAwaited = 64;

  explicit RankWaits(int ranks);

  // The rank goes on when all others have arrived, too: the last to come is the one that the others waited for. A rank
  // may be ahead, and arrive again before the others have come to where it waits.
  void Arrive(int rank, absl::Time now);
  // The rank sleeps until somebody gives what completes its slot.
  void Sleep(int rank, absl::Time now);
  bool any_sleeps() const { return sleeping_ > 0; }
  // `by` has just sent something: those who sleep and are not `still_sleeping` by that waited for it.
  void Wake(int by, absl::Time now, absl::FunctionRef<bool(int rank)> still_sleeping);
  // The rank is awake: what it slept for did not come to it by another rank.
  void GoOn(int rank, absl::Time now) {
    if (ranks_[static_cast<size_t>(rank)].sleeps) End(rank, -1, now);
  }
  // Nobody waits any more, and nobody came.
  void Drop();

  // Of the running step: waits of all ranks together, of those the ones asleep, while all ranks but one waited, and for
  // whom most.
  absl::Duration in_step() const { return in_step_; }
  absl::Duration asleep_in_step() const { return asleep_in_step_; }
  absl::Duration for_one_in_step() const { return for_one_in_step_; }
  // -1: nobody waited.
  int most_awaited_in_step() const;
  absl::Duration awaited_in_step(int rank) const { return by_awaited_in_step_[static_cast<size_t>(rank)]; }
  void BeginStep();

  void Describe(v1::JobMetrics* out) const;

 private:
  struct Rank {
    absl::Time since = absl::InfiniteFuture();  // it waits; infinite: it does not
    bool sleeps = false;
    int ahead = 0;  // how often it has arrived since
  };
  int count() const { return static_cast<int>(ranks_.size()); }
  bool waits(int rank) const { return ranks_[static_cast<size_t>(rank)].since != absl::InfiniteFuture(); }
  bool in_pairs() const { return count() <= kMostInPairs; }
  void Begin(int rank, bool sleeps, absl::Time now);
  // `awaited` -1: nobody.
  void End(int rank, int awaited, absl::Time now);

  std::vector<Rank> ranks_;
  int waiting_ = 0;
  int sleeping_ = 0;
  absl::Time all_but_one_since_ = absl::InfiniteFuture();
  std::vector<absl::Duration> totals_;  // in pairs: of who waits, by awaited; else by awaited, and one for the others
  absl::Duration in_step_, asleep_in_step_;
  absl::Duration for_one_in_step_;
  std::vector<absl::Duration> by_awaited_in_step_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_METER_RANK_WAITS_H_
