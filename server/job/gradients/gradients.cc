#include "server/job/gradients/gradients.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/job_events.h"
#include "server/job/membership/extensions.h"
#include "server/job/step/asked_steps.h"
#include "server/job/step/committed.h"
#include "server/job/step/step_decision.h"
#include "server/multinode/backwards.h"
#include "server/session/session.h"

namespace shardd {
namespace {

constexpr int kAbandonsToldPerStep = 8;

}  // namespace

Gradients::Gradients(std::shared_ptr<const ShardPlan> plan, Facts facts, Services services)
    : plan_(std::move(plan)),
      see_(facts),
      counters_(services.counters),
      events_(services.events),
      pairing_(plan_, see_.committed),
      reductions_(plan_, see_, std::move(services), &pairing_) {}

absl::Status Gradients::Error(int rank, absl::string_view what, absl::string_view fact) const {
  return see_.committed->RankError(absl::StatusCode::kFailedPrecondition, rank, what, fact);
}

absl::Status Gradients::Apply(Session* session, HandleEvent event) const {
  for (size_t g = 0; g < session->handles.size(); ++g) {
    SHARDD_RETURN_IF_ERROR(session->handles[g].Apply(event, group_name(static_cast<int>(g)), session->rank()));
  }
  return absl::OkStatus();
}

absl::Status Gradients::Submit(Session* session, RankCommand command) {
  const int rank = session->rank();
  const int group = command.group;
  const std::string what = absl::StrCat("SubmitGradients group \"", group_name(group), "\"");
  if (plan_->groups[static_cast<size_t>(group)].gradient_slot < 0) {
    return Error(rank, what, "the group has nothing to train");
  }
  if (see_.steps->stepped(rank) || see_.decision->committing()) {
    return Error(rank, what, "the step is being committed");
  }
  absl::StatusOr<Contribution> contribution = pairing_.Check(rank, std::move(command), what);
  SHARDD_RETURN_IF_ERROR(contribution.status());
  SHARDD_RETURN_IF_ERROR(session->handles[group].Apply(HandleEvent::kSubmitGradients, group_name(group), rank));
  counters_->set_gradient_submissions(counters_->gradient_submissions() + 1);
  const PairKey key = pairing_.Give(rank, group, *std::move(contribution));
  SHARDD_RETURN_IF_ERROR(see_.extensions->CheckAllTakePart(rank, what, key.first));
  SHARDD_RETURN_IF_ERROR(pairing_.CheckMissing(key));
  return reductions_.AddComplete(key);
}

absl::Status Gradients::CloseBackward(Session* session, const RankCommand& command) {
  const int64_t index = command.arg0;
  const int rank = session->rank();
  const int closed = pairing_.closed(rank);
  if (see_.steps->stepped(rank)) {
    return Error(rank, "BackwardDone", "the rank has sent Step");
  }
  if (index != closed) {
    return Error(rank, "BackwardDone", absl::StrCat("wrong index (got ", index, ", want ", closed, ")"));
  }
  SHARDD_RETURN_IF_ERROR(Apply(session, HandleEvent::kBackwardDone));
  SHARDD_RETURN_IF_ERROR(pairing_.CheckMayClose(rank));
  SHARDD_RETURN_IF_ERROR(see_.extensions->CheckAllTakePart(rank, "BackwardDone", closed));
  session->words().CountBackward();
  return reductions_.AddClosed(rank, pairing_.Close(rank, command.done));
}

absl::Status Gradients::CloseStep(int rank) { return reductions_.AddClosed(rank, pairing_.CloseAll(rank)); }

absl::Status Gradients::Abandon(Session* session) {
  const int rank = session->rank();
  SHARDD_RETURN_IF_ERROR(Apply(session, HandleEvent::kAbandon));
  counters_->set_abandons(counters_->abandons() + 1);
  session->gave_up = true;
  const int backward = pairing_.closed(rank);
  if (backward == kAllBackwards) {
    return absl::OkStatus();  // it has stepped: only the next forward had begun
  }
  if (const int given = pairing_.GivenInOpenBackward(rank); reductions_.over_nodes() && given >= 0) {
    return Error(rank, "AbandonBackward",
                 absl::StrCat("gradients of group \"", group_name(given),
                              "\" were given to other nodes; the step begins anew on all of them"));
  }
  const Pairing::Abandoned abandoned = pairing_.Abandon(rank);
  for (int slot : abandoned.freed_slots) {
    reductions_.DropSlot(rank, slot);
  }
  if (abandoned.stays > 0) {  // the sum holds what the rank may not give again
    session->words().PublishOthersGave(backward);
  }
  TellAbandon(rank, backward, abandoned);
  return absl::OkStatus();
}

// A rank may give up as often as it likes: what changed nothing is not told, and of the rest a few are.
void Gradients::TellAbandon(int rank, int backward, const Pairing::Abandoned& abandoned) {
  if ((abandoned.taken_back == 0 && abandoned.stays == 0) || abandons_told_ == kAbandonsToldPerStep) {
    return;
  }
  ++abandons_told_;
  events_->Add(rank, "abandon",
               absl::StrCat("gave backward ", backward, " up: ", abandoned.taken_back, " submissions taken back, ",
                            abandoned.stays, " added up already",
                            abandons_told_ < kAbandonsToldPerStep ? "" : "; more of this step are only counted"));
}

absl::Status Gradients::SetPresence(int rank, const RankCommand& command) {
  return pairing_.SetPresence(rank, command.group, command.arg0 != 0, see_.decision->committing());
}

std::vector<int> Gradients::GivenByOthers(const Session& session, uint64_t since) {
  counters_->set_gradient_questions(counters_->gradient_questions() + 1);
  const int rank = session.rank();
  return pairing_.given_by_others().Ask(rank, session.words().BackwardOfStep(since), pairing_.closed(rank));
}

void Gradients::Sleep(int rank, int group) {
  const int slot = plan_->groups[static_cast<size_t>(group)].gradient_slot;
  if (slot >= 0 && pairing_.HoldsSlot(rank, slot)) {
    pairing_.Sleep(rank, slot);
  }
}

absl::StatusOr<DeviceOps> Gradients::Settle() {
  DeviceOps ops = reductions_.SettleAll();
  SHARDD_RETURN_IF_ERROR(pairing_.TakeUneven());
  return ops;
}

void Gradients::StepCommitted() {
  pairing_.EndStep();
  reductions_.EndStep();
  abandons_told_ = 0;
}

void Gradients::EndEpoch() {
  pairing_.EndEpoch();
  reductions_.EndEpoch();
  abandons_told_ = 0;
}

}  // namespace shardd
