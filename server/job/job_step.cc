// The step as ranks ask for it: legal, equal on all, and everything reduced. job_commit.cc decides and applies it.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/job_core.h"

namespace shardd {

absl::Status JobCore::OnStep(Session* session, RankCommand command) {
  v1::Step& step = command.step;
  const int rank = session->rank();
  const bool in_trainers = plan_->config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER;
  const bool entering = writes_.passes().entering(rank) || writes_.hand_ins().wants(rank);
  if (committed_.version() == 0 || in_trainers || entering || steps_.stepped(rank) || decision_.committing() ||
      summons_.full_params().asked(rank)) {
    return committed_.RankError(absl::StatusCode::kFailedPrecondition, rank, "Step",
                                committed_.version() == 0 ? "the job has no parameters yet"
                                : in_trainers ? "the optimizer runs in the trainers; EnterPass commits what it wrote"
                                : entering    ? "the rank is waiting for a pass or a write window"
                                : summons_.full_params().asked(rank) ? "the rank is inside EnterFullParams"
                                                                     : "the rank has already sent Step for this step");
  }
  SHARDD_RETURN_IF_ERROR(extensions_.CheckAllTakePart(rank, "Step"));
  if (static_cast<int64_t>(step.trainer_state().size()) > kMaxTrainerStateBytes) {
    return committed_.RankError(absl::StatusCode::kInvalidArgument, rank, "Step",
                                absl::StrCat("trainer state is too large (got ", step.trainer_state().size(),
                                             ", want at most ", kMaxTrainerStateBytes, " bytes)"));
  }
  if (absl::Status status = CheckHyperParameters(*plan_, step); !status.ok()) {
    return committed_.RankError(status.code(), rank, "Step", status.message());
  }
  for (size_t g = 0; g < session->handles.size(); ++g) {
    SHARDD_RETURN_IF_ERROR(session->handles[g].Apply(HandleEvent::kStep, group_name(static_cast<int>(g)), rank));
  }
  SHARDD_RETURN_IF_ERROR(pairing_.CheckClosed(rank, "Step"));
  steps_.Ask(rank, std::move(step), command.done);
  writes_.Step(rank);
  return CloseStep(session);
}

// The rank submits nothing more in this step.
absl::Status JobCore::CloseStep(Session* session) {
  const int rank = session->rank();
  unsharding_.EndStep(rank);
  return ReduceClosed(rank, pairing_.CloseAll(rank));
}

absl::Status JobCore::BeginDecision() {
  // Nothing that changes shards is begun before every rank's GPU has done with this step.
  Held decision;
  decision.order = Held::Order::kDecisions;
  decision.what = "Step";
  for (int rank = 0; rank < world_size(); ++rank) {
    decision.signals.push_back(given_back_.SignalOf(rank, steps_.signal(rank)));
  }
  if (!given_back_.HaveCome(decision.signals)) {
    decision_.AwaitDevices();
    decision.run = [this] {
      decision_.DevicesCame();
      return absl::OkStatus();
    };
    return given_back_.When(std::move(decision));
  }
  SHARDD_RETURN_IF_ERROR(steps_.CheckEqual());
  SHARDD_RETURN_IF_ERROR(unsharding_.CompareOrders());
  decision_.BeginMeasuring();
  Decide();
  return absl::OkStatus();
}

}  // namespace shardd
