#ifndef SHARDD_SERVER_JOB_METER_GOODPUT_H_
#define SHARDD_SERVER_JOB_METER_GOODPUT_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/time/time.h"
#include "common/clock/monotonic_now.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

// What the time of a job goes into. At any moment the job is in one state:
//
//   starting --Begin--> running --EpochEnds--> absent --Begin--> running
//                          \--Committed--/
//
// What the time since the last commit counts as is decided where it ends: by the commit, or by the end of the epoch.
// `now` is MonotonicNow. Nothing is allocated. Loop-confined.
class Goodput {
 public:
  // Steps whose durations are remembered, for a job that goes back to a snapshot; older ones count with the mean of
  // these.
  static constexpr size_t kRemembered = 256;

  explicit Goodput(absl::Time now) : since_(now) {}

  bool running() const { return state_ == State::kRunning; }
  // When the running step began. REQUIRES: running().
  absl::Time since() const { return since_; }

  // All ranks are there, and so are parameters. REQUIRES: !running().
  void Begin(absl::Time now);
  // `step` is committed. `for_one`: of its time, all ranks but one waited for that one. `updated`: it was not skipped.
  // Returns its duration; zero where the job is not running.
  absl::Duration Committed(int64_t step, absl::Duration for_one, bool updated, absl::Time now);
  // `dropped`: what ranks have done since the last commit is done anew.
  void EpochEnds(bool dropped, absl::Time now);
  // The committed step is `step` again: later ones are done anew. Nothing where it is no earlier one.
  void TakenBack(int64_t step);

  void Describe(absl::Time now, v1::JobTime* time, v1::StepMetrics* steps) const;

 private:
  enum class State { kStarting, kAbsent, kRunning };

  State state_ = State::kStarting;
  absl::Time since_;  // the state, or the running step, began
  absl::Time last_commit_ = absl::InfinitePast();
  int64_t step_ = 0;   // committed here
  int64_t begun_ = 0;  // the last step that was begun, and perhaps dropped, or taken back
  absl::Duration starting_, committed_, for_one_, dropped_, absent_, idle_, taken_back_, redone_;
  int64_t updated_steps_ = 0;
  int64_t skipped_steps_ = 0;
  int64_t dropped_steps_ = 0;
  int64_t taken_back_steps_ = 0;
  std::array<absl::Duration, kRemembered> durations_ = {};  // by step modulo its size
  int64_t remembered_ = 0;                                  // of the newest steps, how many
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_METER_GOODPUT_H_
