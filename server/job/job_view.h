#ifndef SHARDD_SERVER_JOB_JOB_VIEW_H_
#define SHARDD_SERVER_JOB_JOB_VIEW_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/plan/plan.h"
#include "server/job/job_identity.h"
#include "server/job/wait.h"
#include "server/observe/duration_histogram.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

class AbsentRanks;
class AskedSteps;
class Collective;
class Committed;
class Device;
class EpochEnd;
class JobMemory;
class JobMeter;
class JobNodes;
class Leavers;
class Pairing;
class Reductions;
class Session;
class Sessions;
class SnapshotKeeper;
class StepDecision;
class Summons;
class TrainerWrites;
class Unsharding;
class ValueWrites;

// What a job's description says that grows with its model (plan_status.cc). Any thread.
struct JobDescription {
  std::shared_ptr<const ShardPlan> plan;
  std::shared_ptr<const std::vector<int64_t>> step_counts;  // by parameter

  void Complete(v1::Job* out) const;
};

// A job as others see it: operators, ranks that wait, and ranks that come back. Reads what the job's components own,
// and owns and changes nothing. Loop-confined.
class JobView {
 public:
  // All outlive it.
  struct Facts {
    const JobIdentity* identity = nullptr;
    const JobMemory* memory = nullptr;
    const std::vector<Device*>* devices = nullptr;
    const Collective* collective = nullptr;
    const Committed* committed = nullptr;
    const v1::Counters* counters = nullptr;
    const Pairing* pairing = nullptr;
    const Sessions* sessions = nullptr;
    const ValueWrites* values = nullptr;
    const Summons* summons = nullptr;
    const AbsentRanks* absent = nullptr;
    const TrainerWrites* writes = nullptr;
    const Leavers* leavers = nullptr;
    const AskedSteps* steps = nullptr;
    const Unsharding* unsharding = nullptr;
    const StepDecision* decision = nullptr;
    const JobNodes* nodes = nullptr;
    const SnapshotKeeper* snapshots = nullptr;
    const EpochEnd* end = nullptr;
    std::function<Wait(int rank)> waiting_for;  // as the rows of the table say
    const Reductions* reductions = nullptr;
    const JobMeter* meter = nullptr;
  };
  explicit JobView(Facts facts) : see_(std::move(facts)) {}

  // What does not grow with the model; the rest is JobDescription's.
  [[nodiscard]] JobDescription Describe(v1::Job* out) const;
  void DescribeRanks(v1::ListRanksResponse* out) const;
  // All but its memory.
  void DescribeMetrics(v1::JobMetrics* out) const;
  // For whom, and for what, the rank cannot go on; empty: it is its own turn.
  std::string WaitText(int rank) const;
  // The end of the epoch drops something that a rank has begun.
  bool IsMidStep() const;
  // The same, beside that ranks enter a pass or are in one.
  bool IsBeyondPass() const;
  // The last step that ranks may know of: on several nodes, that all of them hold.
  int64_t committed_step() const;
  // Also while what it had is brought from another node: ranks that live come back to it.
  bool has_parameters() const;
  // The rank that reattaches finds what it had. NOT_FOUND: it is lost. ABORTED: another node may have it.
  absl::Status CheckStillHas(const Session& session) const;

 private:
  int world_size() const { return see_.identity->plan->world_size; }
  v1::JobState State() const;
  v1::RankState StateOf(int rank) const;
  void DescribeSession(const Session& session, v1::Rank* out) const;

  const Facts see_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_JOB_VIEW_H_
