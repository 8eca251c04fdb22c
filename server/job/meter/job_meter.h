#ifndef SHARDD_SERVER_JOB_METER_JOB_METER_H_
#define SHARDD_SERVER_JOB_METER_JOB_METER_H_

#include <array>
#include <cstdint>
#include <functional>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "common/shm/ring.h"
#include "server/job/job_part.h"
#include "server/job/meter/goodput.h"
#include "server/job/meter/rank_waits.h"
#include "server/job/meter/step_phases.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

class Committed;
class Sessions;
class StepDecision;

// What a job's time goes into, as the daemon sees it: it decides when a step is one and when work is dropped, so none
// of this is guessed. Owns the figures that GetMetrics says of the job, and changes nothing else. It costs a command
// that begins or ends a phase one look at the clock, and others a comparison; nothing is allocated per step.
// Loop-confined.
class JobMeter final : public JobPart {
 public:
  // All outlive this.
  struct Facts {
    const Sessions* sessions = nullptr;
    const Committed* committed = nullptr;
    const StepDecision* decision = nullptr;
  };
  // `on_step`: hears of each committed step that was measured; null: nobody does.
  JobMeter(int ranks, bool trainers_update, Facts facts, std::function<void(const v1::StepRecord&)> on_step = nullptr);

  // A session has begun: it may have been the last that lacked.
  void SessionBegins() { Review(); }
  // The rank is about to execute a command, after which it is not asleep. `phase`: of an Unshard.
  void Begins(int rank, Opcode opcode, int64_t phase);
  // The rank has executed it, and the job has not gone on yet. `stepped`: an EnterPass that ends a step of the
  // trainers' optimizer; `sleeps_for_turn`: a rank sleeps for a slot that waits to be added.
  void Executed(int rank, Opcode opcode, bool stepped, absl::FunctionRef<bool(int rank)> sleeps_for_turn);
  // The epoch is about to end. `dropped`: work of ranks is dropped with it. `lost`: ranks are. `behind_commit`: it was
  // to end there.
  void EpochEnds(const absl::Status& cause, bool lost, bool behind_commit, bool dropped);

  void StepCommitted() override;
  void VersionCommitted() override { Review(); }
  void EndEpoch() override;

  void Describe(v1::JobMetrics* out) const;

 private:
  // Whether the job runs from here on, or has gone back to an earlier step.
  void Review();

  const Facts see_;
  const std::function<void(const v1::StepRecord&)> on_step_;
  const int count_;
  Goodput goodput_;
  RankWaits waits_;
  StepPhases phases_;
  v1::StepRecord last_;
  bool drops_ = false;  // the end of the epoch that is under way
  std::array<int64_t, v1::InterruptionCause_ARRAYSIZE> interruptions_ = {};
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_METER_JOB_METER_H_
