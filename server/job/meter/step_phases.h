#ifndef SHARDD_SERVER_JOB_METER_STEP_PHASES_H_
#define SHARDD_SERVER_JOB_METER_STEP_PHASES_H_

#include <cstddef>
#include <vector>

#include "absl/time/time.h"
#include "common/clock/monotonic_now.h"
#include "server/observe/duration_histogram.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

// How long the phases of a job's steps take. Between the begin of a step and the last rank's Step every rank goes
// through phases of its own, of which the mean counts; behind it the job has one. So the phases of a step add up to its
// duration, whatever its ranks do at the same time. `now` is MonotonicNow; nothing is allocated after construction.
// Loop-confined.
class StepPhases {
 public:
  // `trainers_update`: the optimizer runs in the trainers, behind their backwards.
  StepPhases(int ranks, bool trainers_update) : trainers_update_(trainers_update), ranks_(ranks) {}

  // A step begins: all ranks are there, or the one before is committed.
  void Begin(absl::Time now);

  // A request of a backward. Only the first of a backward asks for the time.
  bool in_backward(int rank) const { return of(rank).in_backward; }
  void BeginBackward(int rank, absl::Time now);
  void CloseBackward(int rank, absl::Time now);
  // The rank has nothing more to do in this step, whose gradients and parameters it has given.
  void CloseStep(int rank, absl::Time now);

  // When the daemon began to measure a step, and when its update was applied; infinite past: it did not, because it was
  // the trainers' or another daemon's.
  struct Decided {
    absl::Time measuring = absl::InfinitePast();
    absl::Time applied = absl::InfinitePast();
  };
  // What all ranks together have waited for others in this step, and of that asleep, for a gradient slot.
  struct Waited {
    absl::Duration total = absl::ZeroDuration();
    absl::Duration asleep = absl::ZeroDuration();
  };
  // The step is committed.
  v1::StepRecord Commit(absl::Time now, const Waited& waited, const Decided& decided);

  void Describe(v1::StepMetrics* out) const;

 private:
  struct Rank {
    absl::Time since;  // its phase
    bool in_backward = false;
    bool had_backward = false;
  };
  Rank& of(int rank) { return ranks_[static_cast<size_t>(rank)]; }
  const Rank& of(int rank) const { return ranks_[static_cast<size_t>(rank)]; }
  // The rank's phase ends.
  void Add(int rank, absl::Duration* sum, absl::Time now);

  const bool trainers_update_;
  std::vector<Rank> ranks_;
  // Of the running step:
  absl::Time began_;
  absl::Time all_closed_;  // the last rank has closed it
  absl::Duration forward_sum_, backward_sum_, optimizer_sum_;
  // Of all steps:
  DurationHistogram duration_, forward_, backward_, optimizer_, waiting_, reduction_, commit_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_METER_STEP_PHASES_H_
