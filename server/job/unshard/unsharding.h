#ifndef SHARDD_SERVER_JOB_UNSHARD_UNSHARDING_H_
#define SHARDD_SERVER_JOB_UNSHARD_UNSHARDING_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "common/plan/plan.h"
#include "common/schedule/pooled_unshards.h"
#include "common/schedule/request_orders.h"
#include "server/job/job_part.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

class AskedSteps;
class Collective;
class Committed;
class GivenBack;
class JobEvents;
class JobMemory;
class JobWork;
class NodeGathers;
class Session;
class Sessions;
class StepDecision;
class TrainerWrites;

// Unshard and reshard: what ranks may request, in which order they do, which slots of the pool that takes, and the
// gathers that fill these. Owns the orders, the requests and the slots; publishes grants in the ranks' pages.
// Loop-confined. A method that returns an error leaves it to the caller to end the epoch.
class Unsharding final : public JobPart {
 public:
  struct Facts {
    const Committed* committed = nullptr;
    const StepDecision* decision = nullptr;
    const AskedSteps* steps = nullptr;
    const TrainerWrites* writes = nullptr;
    const Sessions* sessions = nullptr;
    const JobMemory* memory = nullptr;
  };
  struct Services {
    Collective* collective = nullptr;  // gathers
    GivenBack* given_back = nullptr;   // waits for the devices that read a slot
    JobWork* work = nullptr;
    JobEvents* events = nullptr;
    v1::Counters* counters = nullptr;
    JobControl* job = nullptr;
  };
  // All of both outlive this.
  Unsharding(std::shared_ptr<const ShardPlan> plan, Facts facts, Services services);
  // Parameters are cut over nodes. `gathers` outlives every call but those of devices. Before anything else.
  void GatherFromNodes(NodeGathers* gathers) { gathers_ = gathers; }

  // Ranks unshard into slots of a pool; else parameters are read where they lie, and a request is granted at once.
  bool pooled() const { return unshards_.pooled(); }
  int pending_fills() const { return unshards_.pending_fills(); }
  bool AwaitsFill(int rank) const { return unshards_.AwaitsFill(rank); }
  bool MayRetry() const { return unshards_.MayRetry(); }

  absl::Status Unshard(Session* session, int group, int64_t phase);
  absl::Status Reshard(Session* session, int group, uint64_t done);
  // The rank submits gradients: what it will ask for next may be gathered. An error where that departs from the
  // captured order and the job is strict.
  absl::Status GradientsSubmitted(int rank, int group);
  // Grants what was deferred.
  absl::Status Retry();

  // The rank's later requests belong to its next backward; to its next step.
  void CloseBackward(int rank) { orders_.CloseBackward(rank); }
  void EndStep(int rank) { orders_.EndStep(rank); }
  // The rank gives up what it has begun since its last CloseBackward. `done`: the signal behind which its device reads
  // nothing of it.
  void Abandon(int rank, uint64_t done);
  // The step that all ranks have ended is about to be committed: an error where their orders differ and the job is
  // strict.
  absl::Status CompareOrders();
  void SessionEnds(Session* session) override;
  void Forget(int rank) override;

  void StepCommitted() override { orders_.StepCommitted(); }
  void VersionCommitted() override;
  void EndEpoch() override;

 private:
  int world_size() const { return plan_->world_size; }
  const std::string& group_name(int group) const { return plan_->groups[static_cast<size_t>(group)].name; }
  absl::Status CheckMayUnshard(int rank, int group, int64_t phase, bool begins) const;
  // Records a request of the rank's. An error where it departs from the captured order and the job is strict.
  absl::Status Observe(int rank, OrderEntry entry);
  absl::Status Departed(const Departure& departure);
  // Grants what the rank has asked for, as far as there are slots.
  absl::Status GrantNext(int rank);
  // Gathers ahead what follows the request in the captured order, as far as there is room.
  absl::Status PrefetchBehind(int rank, OrderEntry::Kind request);
  // Fills the slot when the devices that read it have done with it.
  absl::Status FillSlot(const PoolFill& fill);
  void SubmitFill(const PoolFill& fill);
  void OnFilled(const PoolFill& fill, absl::Status status);

  const std::shared_ptr<const ShardPlan> plan_;
  const Facts see_;
  const Services use_;
  NodeGathers* gathers_ = nullptr;
  RequestOrders orders_;
  PooledUnshards unshards_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_UNSHARD_UNSHARDING_H_
