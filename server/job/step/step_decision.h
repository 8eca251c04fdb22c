#ifndef SHARDD_SERVER_JOB_STEP_STEP_DECISION_H_
#define SHARDD_SERVER_JOB_STEP_STEP_DECISION_H_

// Where the next version of a job's shards stands, and what a step decided that makes it. Exactly one of these holds:
//
//   open -> awaits devices -> open -> measuring -> updating -> applied -> showing -> open    a step
//   open -> committing -> open                                                              any other version
//
// A part of a step (v1::Step.part) goes the same way and from `applied` to `open`: it is no version, and what it has
// changed is undone with the epoch.
//
// From `updating` on nothing is dropped but by CommitUnshown, and only while `applied`.

#include <cstdint>
#include <vector>

#include "absl/time/time.h"
#include "common/clock/monotonic_now.h"
#include "common/plan/plan.h"
#include "server/optimizer/decided_step.h"
#include "shardd/v1/journal.pb.h"
#include "shardd/v1/peer.pb.h"
#include "shardd/v1/trainer.pb.h"

namespace shardd {

// Owns the state and the facts of the decision, and submits nothing. Loop-confined.
class StepDecision {
 public:
  bool awaits_devices() const { return state_ == State::kAwaitsDevices; }
  // The step is being measured, or is decided and not committed.
  bool deciding() const { return state_ >= State::kMeasuring; }
  // A version is being made; or is made and waits to be shown.
  bool committing() const { return state_ == State::kCommitting || state_ >= State::kUpdating; }
  bool applied() const { return state_ >= State::kApplied; }  // the shards are those of the decided step
  bool showing() const { return state_ == State::kShowing; }  // ranks are about to see it
  // The step is, which commits it: not one of its parts.
  bool decided() const { return state_ >= State::kUpdating && !step_.is_part; }
  // Of the newest step: it updates nothing, and when it began to be measured and was applied (MonotonicNow).
  bool skipped() const { return skipped_; }
  double grad_norm() const { return grad_norm_; }
  // Parts of the running step that are made, and taken back if the epoch ends before the step is committed.
  int64_t parts() const { return parts_; }
  // What parts have changed, or a part is changing, is of no version, nor of a step that is decided.
  bool has_uncommitted() const { return state_ >= State::kUpdating ? step_.is_part : parts_ > 0; }
  bool is_part() const { return step_.is_part; }  // REQUIRES: Fix
  double clip_factor() const { return clip_factor_; }
  absl::Time measuring_since() const { return measuring_since_; }
  absl::Time applied_since() const { return applied_since_; }

  // The ranks' devices have not done with the step yet; then they have.
  void AwaitDevices() { state_ = State::kAwaitsDevices; }
  void DevicesCame() { state_ = awaits_devices() ? State::kOpen : state_; }
  void BeginMeasuring();
  // The daemon before has made so many parts of the running step. Before anything else.
  void TakeUpParts(int64_t parts) { parts_ = parts; }
  // The global norm of the gradients is there. Not finite under a loss scale: the step is skipped.
  void Measured(double norm, const v1::Step& step);
  // Node 0 has measured.
  void Heard(const v1::PeerMessage::Decided& decided);
  // Fixes what the update does. `present`: by parameter, it has a gradient; `step_counts`: by parameter, updates
  // before this step.
  void Fix(const v1::Step& step, const std::vector<bool>& present, const std::vector<int64_t>& step_counts);
  void BeginUpdate() { state_ = State::kUpdating; }
  void Applied();
  void Show() { state_ = State::kShowing; }

  // A version that no step decides.
  void BeginCommit() { state_ = State::kCommitting; }
  // The part of a step that was applied is there, and the step goes on.
  void PartMade() {
    ++parts_;
    End();
  }
  // The step is committed.
  void EndParts() { parts_ = 0; }
  // The version is there, or its making failed and the job ends.
  void End() { state_ = State::kOpen; }
  // A step that has changed nothing yet is dropped.
  void EndEpoch();

  // REQUIRES: Fix.
  const DecidedStep& step() const { return step_; }
  // By parameter: the decided step updates it, and that is in the shards.
  bool Applies(size_t param) const { return applied() && step_.present[param]; }
  // What the journal, the other nodes and the ranks are told. All but the job's own facts: step, epoch, version.
  void Describe(v1::DecidedStepRecord* out) const;
  void Describe(v1::PeerMessage::Decided* out) const;
  void Describe(v1::SessionEvent::Committed* out) const;

 private:
  enum class State { kOpen, kCommitting, kAwaitsDevices, kMeasuring, kUpdating, kApplied, kShowing };

  State state_ = State::kOpen;
  DecidedStep step_;
  double grad_norm_ = 0;
  double clip_factor_ = 1;  // without the loss scale
  bool skipped_ = false;
  int64_t parts_ = 0;
  absl::Time measuring_since_ = absl::InfinitePast();
  absl::Time applied_since_ = absl::InfinitePast();
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_STEP_STEP_DECISION_H_
