#ifndef SHARDD_SERVER_JOB_GRADIENTS_GRADIENTS_H_
#define SHARDD_SERVER_JOB_GRADIENTS_GRADIENTS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/handle/handle.h"
#include "common/plan/plan.h"
#include "server/job/gradients/pairing.h"
#include "server/job/gradients/reductions.h"
#include "server/job/job_part.h"
#include "server/session/rank_command.h"

namespace shardd {

class Extensions;
class JobEvents;
class Session;
class StepDecision;

// Gradients as ranks' commands give them. Checks what ranks may do, and owns how their gradients are paired (Pairing)
// and added (Reductions), and how often they gave a backward up. Loop-confined. A method that returns an error leaves
// it to the caller to end the epoch.
class Gradients final : public JobPart {
 public:
  // All of both outlive this.
  struct Facts : Reductions::Facts {
    const StepDecision* decision = nullptr;
    const Extensions* extensions = nullptr;
  };
  struct Services : Reductions::Services {
    JobEvents* events = nullptr;
  };
  Gradients(std::shared_ptr<const ShardPlan> plan, Facts facts, Services services);

  const Pairing& pairing() const { return pairing_; }
  // Which gradient shards hold a gradient; the step, and values from trainers, change it.
  GradientPresence& presence() { return pairing_.presence(); }
  Reductions& reductions() { return reductions_; }
  const Reductions& reductions() const { return reductions_; }

  // Commands -----------------------------------------------------------------------------------------
  absl::Status Submit(Session* session, RankCommand command);
  absl::Status CloseBackward(Session* session, const RankCommand& command);
  // User code gave up its forward or backward: the rank goes back to where its last backward was closed, and nobody
  // else does.
  absl::Status Abandon(Session* session);
  // The rank has dropped a gradient between backwards, or written it by itself.
  absl::Status SetPresence(int rank, const RankCommand& command);
  // The rank asks for the parameters of which, behind its session's first `since` backwards, others gave a gradient and
  // it did not; ascending.
  std::vector<int> GivenByOthers(const Session& session, uint64_t since);
  // The rank's client sleeps until the group's slot is free, or it sends something.
  void Sleep(int rank, int group);
  void Wake(int rank) { pairing_.Wake(rank); }
  // The rank submits nothing more in this step.
  absl::Status CloseStep(int rank);

  // What devices do, by rank, so that every gradient shard holds its gradient or zeros. FAILED_PRECONDITION: on several
  // nodes, ranks of this one have dropped what others have not.
  absl::StatusOr<DeviceOps> Settle();

  void StepCommitted() override;
  void Forget(int rank) override { pairing_.Forget(rank); }
  void EndEpoch() override;

 private:
  const std::string& group_name(int group) const { return plan_->groups[static_cast<size_t>(group)].name; }
  absl::Status Error(int rank, absl::string_view what, absl::string_view fact) const;
  absl::Status Apply(Session* session, HandleEvent event) const;
  void TellAbandon(int rank, int backward, const Pairing::Abandoned& abandoned);

  const std::shared_ptr<const ShardPlan> plan_;
  const Facts see_;
  v1::Counters* const counters_;
  JobEvents* const events_;
  Pairing pairing_;
  Reductions reductions_;
  int abandons_told_ = 0;  // in this step
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_GRADIENTS_GRADIENTS_H_
