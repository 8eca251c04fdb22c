#ifndef SHARDD_SERVER_JOB_FULL_PARAMS_SUMMONS_H_
#define SHARDD_SERVER_JOB_FULL_PARAMS_SUMMONS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/handle/handle.h"
#include "server/job/full_params/full_params.h"
#include "server/job/job_part.h"
#include "server/job/wait.h"
#include "server/job/work/optimizer_devices.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

class Committed;
class Device;
class Extensions;
class GivenBack;
class JobEvents;
class JobWork;
class Leavers;
class Pairing;
struct RankCommand;
class Session;
class Sessions;
class StepDecision;
class TrainerWrites;
class WriteUndo;

// How all ranks come to full parameters and leave them again: who may ask, when they are let in, what they are told.
// Owns what ranks have asked for (FullParams); submits what settles gradients before they are read. Loop-confined. A
// method that returns an error leaves it to the caller to end the epoch.
class Summons final : public JobPart {
 public:
  struct Facts {
    const v1::JobSpec* spec = nullptr;
    const ShardPlan* plan = nullptr;
    bool over_nodes = false;
    const Committed* committed = nullptr;
    const StepDecision* decision = nullptr;
    const Sessions* sessions = nullptr;
    const Pairing* pairing = nullptr;
    const TrainerWrites* writes = nullptr;
    const Extensions* extensions = nullptr;
    const Leavers* leavers = nullptr;
    const WriteUndo* undo = nullptr;
  };
  struct Services {
    const std::vector<Device*>* devices = nullptr;  // by rank
    GivenBack* given_back = nullptr;
    JobWork* work = nullptr;
    JobEvents* events = nullptr;
    // What devices do, by rank, before gradients are read that some ranks have and others have not.
    std::function<DeviceOps()> settle_gradients;
    // Whether there is memory for the old bytes of a writeback, which all ranks have asked for.
    std::function<absl::Status()> check_undo_fits;
    JobControl* job = nullptr;
  };
  // All of both outlive this.
  Summons(Facts facts, Services services)
      : see_(facts), use_(std::move(services)), full_params_(facts.plan->world_size) {}

  const FullParams& full_params() const { return full_params_; }

  absl::Status Enter(Session* session, const RankCommand& command);
  // *last: the last rank has left, and what it wrote and did not commit is to be undone.
  absl::Status Leave(Session* session, uint64_t done, bool* last);

  // The rank has asked, or it has finished and those who have asked only read: they need nothing of it.
  bool IsReady(int rank) const;
  // All are ready: who has asked may be let in, but for sums that are under way.
  bool MayGrant() const;
  // FAILED_PRECONDITION: gradients are asked for, and ranks have not closed the same backwards.
  absl::Status CheckEqualBackwards() const;
  // Gradients are asked for. `sums_may_wait`: sums are under way that no stream of this daemon's is in order with.
  bool SumsHold(bool sums_may_wait) const { return full_params_.agreed()->with_grads && sums_may_wait; }
  // Over several nodes an error where there is no memory for the old bytes: the others would wait for what this node's
  // ranks do not write.
  absl::Status LetIn();
  // RESOURCE_EXHAUSTED: there is none. REQUIRES: ranks write.
  absl::Status CheckUndoFits() const;
  // Tells all ranks that none is let in, and why: they are where they were before they asked.
  absl::Status Refuse(const absl::Status& why);
  Wait WaitingFor(int rank) const;

  void LeaveSignalsCame() { full_params_.LeaveSignalsCame(); }
  void Forget(int rank) override { full_params_.Forget(rank); }
  void ValuesCommitted() override { full_params_.WritesCommitted(); }
  void EndEpoch() override { full_params_.EndEpoch(); }

 private:
  int world_size() const { return see_.plan->world_size; }
  const std::string& group_name(int group) const { return see_.plan->groups[static_cast<size_t>(group)].name; }
  absl::Status Error(int rank, absl::string_view what, absl::string_view fact) const;
  absl::Status Apply(Session* session, HandleEvent event) const;
  void SettleBehindReductions();
  void Grant();
  // `present`: of gradients, empty where they were not asked for.
  void Say(int rank, const std::string& present, const absl::Status& status);

  const Facts see_;
  const Services use_;
  FullParams full_params_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_FULL_PARAMS_SUMMONS_H_
