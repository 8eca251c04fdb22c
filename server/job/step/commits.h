#ifndef SHARDD_SERVER_JOB_STEP_COMMITS_H_
#define SHARDD_SERVER_JOB_STEP_COMMITS_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/plan/plan.h"
#include "common/tensor/norm.h"
#include "server/job/gradients/gradients.h"
#include "server/job/job_part.h"
#include "server/job/step/asked_steps.h"
#include "server/job/step/step_decision.h"
#include "server/job/wait.h"
#include "server/job/work/optimizer_devices.h"
#include "server/session/rank_command.h"
#include "shardd/v1/jobs.pb.h"
#include "shardd/v1/peer.pb.h"

namespace shardd {

class Committed;
class Extensions;
class JobMemory;
class JobTrace;
class JobWork;
class Session;
class Sessions;
class SnapshotKeeper;
class Summons;
class TrainerWrites;
class Unsharding;
class ValueWrites;

// Makes the versions of a job's shards. A step goes
//
//   asked for by all ranks -> their devices have done with it -> measured -> decided -> journaled -> applied -> shown
//
// or, of several optimizers, in parts, each of which ranks see before the step is committed with the last one:
//
//   asked for by all ranks -> their devices have done with it -> measured -> old bytes are kept -> applied -> shown
//
// and whatever else becomes a version goes through Make. From the journal on, and in all of Make, a version completes
// forward: no epoch ends before it is committed, and an error of a device ends the job.
//
// Owns what ranks have asked for and what is decided of it, and tells the ranks of commits. Loop-confined. A method
// that returns an error leaves it to the caller to end the epoch.
class Commits final : public JobPart {
 public:
  struct Facts {
    const ShardPlan* plan = nullptr;
    const JobMemory* memory = nullptr;
    const Sessions* sessions = nullptr;
    const Summons* summons = nullptr;
    const Extensions* extensions = nullptr;
    const OptimizerDevices* devices = nullptr;
  };
  struct Services {
    Committed* committed = nullptr;
    Gradients* gradients = nullptr;  // which a step uses up
    TrainerWrites* writes = nullptr;
    Unsharding* unsharding = nullptr;
    GivenBack* given_back = nullptr;
    SnapshotKeeper* snapshots = nullptr;
    ValueWrites* values = nullptr;  // whose undo has what parts of a step have changed
    JobWork* work = nullptr;
    JobTrace* trace = nullptr;
    v1::Counters* counters = nullptr;
    JobControl* job = nullptr;
  };
  // The job spans several nodes: all of them say that a step is reduced, and what node 0 then decides comes back by
  // Measured, on node 0, or Heard.
  struct Nodes {
    int node = 0;
    std::function<int64_t()> held_step;  // the last step that all nodes hold
    std::function<void(const Norm& own_norm)> say_reduced;
    std::function<void()> say_decided;     // the decision is journaled here, and shards are about to change
    std::function<void()> say_part;        // likewise with a part of the step, of which nothing is journaled
    std::function<void()> part_made;       // and it is there
    std::function<uint64_t()> generation;  // in which the step was promised
  };
  // All of these outlive this.
  Commits(Facts facts, Services services)
      : see_(facts), use_(services), steps_(facts.plan->world_size, use_.committed) {}
  // The step is asked for and promised by the daemon before, and node 0 says what becomes of it. Before anything else.
  void TakeUp(const v1::PromisedStepRecord& promised);
  // Before anything else.
  void SpanNodes(Nodes nodes) { nodes_ = std::move(nodes); }

  const AskedSteps& steps() const { return steps_; }
  const StepDecision& decision() const { return decision_; }

  // FAILED_PRECONDITION: a rank that has sent a part of its step sends something else than the step's other parts.
  absl::Status CheckBetweenParts(int rank, Opcode opcode) const;

  // The step -----------------------------------------------------------------------------------------
  absl::Status Step(Session* session, RankCommand command);
  // The rank's own optimizer has made the step, and keeps `state` with it.
  absl::Status StepInTrainer(int rank, std::string state);
  Wait WaitingToStep(int rank) const;
  // All ranks have stepped, and all gradients are added: decides, or waits for the ranks' devices.
  absl::Status BeginDecision();
  // Over nodes, on node 0: of all gradients.
  void Measured(double norm);
  // Over nodes, elsewhere.
  void Heard(const v1::PeerMessage::Decided& decided);
  // A step that every node holds is shown: were a node lost that alone knows of it, the others would make another one.
  bool MayShow() const;
  void Show();
  // A step that is being shown completes forward. One that may not be shown yet may be so for as long as another node
  // is silent, and the epoch may end meanwhile.
  bool MayEndEpoch() const { return !decision_.committing() || (decision_.applied() && !MayShow()); }
  // The shards are those of a step that is applied. Public for an epoch that ends before the step may be shown: its
  // ranks have gone without having been told.
  void CommitStep();
  // The step that ranks made by their own optimizers, whose shards are there.
  void CommitStepInTrainers();
  // Over nodes it is decided as every other: BeginInTrainers, and StoredInTrainers when what ranks have stored is kept.
  void BeginInTrainers() { decision_.BeginMeasuring(); }
  void StoredInTrainers() { MeasuredHere(Norm(/*order=*/2)); }

  // Other versions -----------------------------------------------------------------------------------
  struct Version {
    std::string what;   // "commit of parameters": begins an error
    std::string label;  // "cast": of the work, which adds the version
    DeviceOps ops;      // by rank
    bool in_order = false;
    bool snapshot_is_due = false;
    bool stepped = false;          // it ends the step that ranks have made by their own optimizers
    std::function<void()> commit;  // where all went well; calls Committed
  };
  // A version is being made from here on.
  void Begin() { decision_.BeginCommit(); }
  void Make(Version version);
  // As Gradients::Settle: for a version that ends a step.
  absl::StatusOr<DeviceOps> SettleGradients() { return use_.gradients->Settle(); }
  // It cannot be made.
  void GiveUp(const std::string& what, const absl::Status& status);

  void Forget(int rank) override { steps_.Forget(rank); }
  void StepCommitted() override;
  void VersionCommitted() override;
  void EndEpoch() override;

 private:
  int world_size() const { return see_.plan->world_size; }
  absl::Status CheckMayStep(int rank, const v1::Step& step) const;
  absl::Status CheckMayStepInParts() const;
  void TakeUpParts(const v1::PromisedStepRecord& promised);
  absl::Status CloseStep(int rank);
  bool in_trainers() const { return see_.plan->config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER; }
  absl::Status Measure();
  // Of several nodes, this one's part.
  void MeasuredHere(const Norm& norm);
  void Decide();
  // A part of a step: keeps the bytes that it changes, then updates.
  void SaveThenUpdate();
  void Update();
  void CommitPart();

  const Facts see_;
  const Services use_;
  Nodes nodes_;
  AskedSteps steps_;
  StepDecision decision_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_STEP_COMMITS_H_
