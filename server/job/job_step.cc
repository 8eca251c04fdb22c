// The step as ranks ask for it: legal, equal on all, and everything reduced. job_commit.cc decides and applies it.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/job_core.h"
#include "server/optimizer/step_difference.h"

namespace shardd {

absl::Status JobCore::OnStep(Session* session, RankCommand command) {
  v1::Step& step = command.step;
  const int rank = session->rank();
  RankStep& state = ranks_[rank];
  const bool in_trainers = plan_->config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER;
  const bool entering = passes_.entering(rank) || windows_.wants(rank);
  if (committed_.version() == 0 || in_trainers || entering || state.stepped || decision_.committing() ||
      full_params_.asked(rank)) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, "Step",
                     committed_.version() == 0  ? "the job has no parameters yet"
                     : in_trainers              ? "the optimizer runs in the trainers; EnterPass commits what it wrote"
                     : entering                 ? "the rank is waiting for a pass or a write window"
                     : full_params_.asked(rank) ? "the rank is inside EnterFullParams"
                                                : "the rank has already sent Step for this step");
  }
  SHARDD_RETURN_IF_ERROR(CheckNobodyFinished(rank, "Step"));
  if (static_cast<int64_t>(step.trainer_state().size()) > kMaxTrainerStateBytes) {
    return RankError(absl::StatusCode::kInvalidArgument, rank, "Step",
                     absl::StrCat("trainer state is too large (got ", step.trainer_state().size(), ", want at most ",
                                  kMaxTrainerStateBytes, " bytes)"));
  }
  if (absl::Status status = CheckHyperParameters(*plan_, step); !status.ok()) {
    return RankError(status.code(), rank, "Step", status.message());
  }
  for (size_t g = 0; g < session->handles.size(); ++g) {
    SHARDD_RETURN_IF_ERROR(session->handles[g].Apply(HandleEvent::kStep, group_name(static_cast<int>(g)), rank));
  }
  SHARDD_RETURN_IF_ERROR(pairing_.CheckClosed(rank, "Step"));
  state.stepped = true;
  state.done_at_step = command.done;
  state.step = std::move(step);
  passes_.Leave(rank);  // it has stopped reading, and writing
  windows_.CloseWithStep(rank);
  return CloseStep(session);
}

// The rank submits nothing more in this step.
absl::Status JobCore::CloseStep(Session* session) {
  const int rank = session->rank();
  orders_.EndStep(rank);
  return ReduceClosed(rank, pairing_.CloseAll(rank));
}

absl::Status JobCore::CompareSteps() const {
  const v1::Step& first = ranks_[0].step;
  for (int rank = 1; rank < world_size(); ++rank) {
    const v1::Step& other = ranks_[rank].step;
    const std::string difference = StepDifference(other, first);
    if (!difference.empty()) {
      return RankError(absl::StatusCode::kFailedPrecondition, rank, "Step",
                       absl::StrCat("hyperparameters of rank ", rank, " differ from rank 0's: ", difference));
    }
  }
  return absl::OkStatus();
}

absl::Status JobCore::BeginDecision() {
  // Nothing that changes shards is begun before every rank's GPU has done with this step.
  Held decision;
  decision.order = Held::Order::kDecisions;
  decision.what = "Step";
  for (int rank = 0; rank < world_size(); ++rank) {
    decision.signals.push_back(given_back_.SignalOf(rank, ranks_[rank].done_at_step));
  }
  if (!given_back_.HaveCome(decision.signals)) {
    decision_.AwaitDevices();
    decision.run = [this] {
      decision_.DevicesCame();
      return absl::OkStatus();
    };
    return given_back_.When(std::move(decision));
  }
  SHARDD_RETURN_IF_ERROR(CompareSteps());
  SHARDD_RETURN_IF_ERROR(CompareOrders());
  decision_.BeginMeasuring();
  Decide();
  return absl::OkStatus();
}

}  // namespace shardd
