// Gradients as ranks' commands give them. Which are added together is for gradients/pairing.h; job_reduce.cc adds them.

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/job_core.h"

namespace shardd {
namespace {

constexpr int kAbandonsToldPerStep = 8;

}  // namespace

absl::Status JobCore::OnSubmitGradients(Session* session, RankCommand command) {
  const int rank = session->rank();
  const int group = command.group;
  const std::string what = absl::StrCat("SubmitGradients group \"", group_name(group), "\"");
  if (plan_->groups[group].gradient_slot < 0) {
    return committed_.RankError(absl::StatusCode::kFailedPrecondition, rank, what, "the group has nothing to train");
  }
  if (commits_.steps().stepped(rank) || commits_.decision().committing()) {
    return committed_.RankError(absl::StatusCode::kFailedPrecondition, rank, what, "the step is being committed");
  }
  absl::StatusOr<Contribution> contribution = pairing_.Check(rank, std::move(command), what);
  SHARDD_RETURN_IF_ERROR(contribution.status());
  SHARDD_RETURN_IF_ERROR(session->handles[group].Apply(HandleEvent::kSubmitGradients, group_name(group), rank));
  SHARDD_RETURN_IF_ERROR(unsharding_.Observe(rank, {OrderEntry::Kind::kSubmitGradients, group}));
  counters_.set_gradient_submissions(counters_.gradient_submissions() + 1);
  const PairKey key = pairing_.Give(rank, group, *std::move(contribution));
  SHARDD_RETURN_IF_ERROR(extensions_.CheckAllTakePart(rank, what, key.first));
  SHARDD_RETURN_IF_ERROR(pairing_.CheckMissing(key));
  SHARDD_RETURN_IF_ERROR(unsharding_.PrefetchAfterGradients(rank));
  return TryReduce(key);
}

absl::Status JobCore::OnBackwardDone(Session* session, const RankCommand& command) {
  const int64_t index = command.arg0;
  const int rank = session->rank();
  const int closed = pairing_.closed(rank);
  if (commits_.steps().stepped(rank) || index != closed) {
    return committed_.RankError(absl::StatusCode::kFailedPrecondition, rank, "BackwardDone",
                                commits_.steps().stepped(rank)
                                    ? std::string("the rank has sent Step")
                                    : absl::StrCat("wrong index (got ", index, ", want ", closed, ")"));
  }
  for (size_t g = 0; g < session->handles.size(); ++g) {
    SHARDD_RETURN_IF_ERROR(
        session->handles[g].Apply(HandleEvent::kBackwardDone, group_name(static_cast<int>(g)), rank));
  }
  SHARDD_RETURN_IF_ERROR(pairing_.CheckMayClose(rank));
  SHARDD_RETURN_IF_ERROR(extensions_.CheckAllTakePart(rank, "BackwardDone", closed));
  session->words().CountBackward();
  unsharding_.CloseBackward(rank);
  return ReduceClosed(rank, pairing_.Close(rank, command.done));
}

absl::Status JobCore::ReduceClosed(int rank, const std::vector<PairKey>& keys) {
  for (const PairKey& key : keys) {
    SHARDD_RETURN_IF_ERROR(pairing_.CheckMissing(rank, key));
    SHARDD_RETURN_IF_ERROR(TryReduce(key));
    pairing_.ForgetIfClosed(key);
  }
  return absl::OkStatus();
}

// User code gave up its forward or backward: the rank goes back to where its last backward was closed, and nobody else
// does.
absl::Status JobCore::OnAbandonBackward(Session* session, uint64_t done) {
  const int rank = session->rank();
  for (size_t g = 0; g < session->handles.size(); ++g) {
    SHARDD_RETURN_IF_ERROR(session->handles[g].Apply(HandleEvent::kAbandon, group_name(static_cast<int>(g)), rank));
  }
  counters_.set_abandons(counters_.abandons() + 1);
  session->gave_up = true;
  unsharding_.Abandon(rank, done);
  const int backward = pairing_.closed(rank);
  if (backward == kAllBackwards) {
    return absl::OkStatus();  // it has stepped: only the next forward had begun
  }
  if (const int given = pairing_.GivenInOpenBackward(rank); nodes_ != nullptr && given >= 0) {
    return committed_.RankError(absl::StatusCode::kFailedPrecondition, rank, "AbandonBackward",
                                absl::StrCat("gradients of group \"", group_name(given),
                                             "\" were given to other nodes; the step begins anew on all of them"));
  }
  const Pairing::Abandoned abandoned = pairing_.Abandon(rank);
  for (int slot : abandoned.freed_slots) {
    IssueSlot(rank, slot, /*stream_ordered=*/false);
    ReleaseSlot(rank, slot, /*stream_ordered=*/false);
  }
  TellAbandon(rank, backward, abandoned);
  return absl::OkStatus();
}

// A rank may give up as often as it likes: what changed nothing is not told, and of the rest a few are.
void JobCore::TellAbandon(int rank, int backward, const Pairing::Abandoned& abandoned) {
  if ((abandoned.taken_back == 0 && abandoned.stays == 0) || abandons_told_ == kAbandonsToldPerStep) {
    return;
  }
  ++abandons_told_;
  events_.Add(rank, "abandon",
              absl::StrCat("gave backward ", backward, " up: ", abandoned.taken_back, " submissions taken back, ",
                           abandoned.stays, " added up already",
                           abandons_told_ < kAbandonsToldPerStep ? "" : "; more of this step are only counted"));
}

// Gradient slots: issued, and released, when what was in them is to be added, or is.

void JobCore::IssueSlot(int rank, int slot, bool stream_ordered) {
  if (stream_ordered) {  // its next submission waits for this one where it writes, and so does what reads it
    pairing_.FreeSlot(rank, slot);
  }
  if (!sums_.by_trainers()) {
    sessions_[rank]->words().PublishSlotIssued(slot);
  }
}

void JobCore::ReleaseSlot(int rank, int slot, bool stream_ordered) {
  trace_.Released(rank, slot);
  if (!stream_ordered) {
    pairing_.FreeSlot(rank, slot);
  }
  sessions_[rank]->words().PublishSlotReleased(slot);
  if (sums_.by_trainers()) {
    sessions_[rank]->words().PublishSlotIssued(slot);  // README.md says why not before
  }
}

void JobCore::OnWaitGradientSlot(Session* session, int group) {
  const int slot = plan_->groups[group].gradient_slot;
  if (slot >= 0 && pairing_.HoldsSlot(session->rank(), slot)) {
    pairing_.Sleep(session->rank(), slot);
  }
}

}  // namespace shardd
