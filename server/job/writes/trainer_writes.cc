#include "server/job/writes/trainer_writes.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/plan/session_layout.h"
#include "common/status/status_macros.h"
#include "server/job/full_params/full_params.h"
#include "server/job/gradients/pairing.h"
#include "server/job/membership/extensions.h"
#include "server/job/membership/sessions.h"
#include "server/job/step/asked_steps.h"
#include "server/job/step/committed.h"
#include "server/job/writes/snapshot.h"
#include "server/session/session.h"

namespace shardd {
namespace {

// Of which LateRanks and CheckStuck ask whom they wait for.
constexpr size_t kMostBlockedAtOnce = 8;
// A rank that wants to hand in for so long while another waits for its gradients will not be let in.
constexpr absl::Duration kStuckAfter = absl::Seconds(1);

}  // namespace

absl::Status TrainerWrites::CheckTrainersWrite(int rank, absl::string_view what) const {
  return trainers_write()
             ? absl::OkStatus()
             : absl::FailedPreconditionError(absl::StrCat(
                   what, ": the job's trainers never write (got trainers_never_write true, want false; rank=", rank,
                   ")"));
}

absl::Status TrainerWrites::EnterPass(int rank, bool stepped, uint64_t signal, std::string* trainer_state) {
  SHARDD_RETURN_IF_ERROR(CheckTrainersWrite(rank, "EnterPass"));
  if (see_.committed->version() == 0 || see_.full_params->asked(rank) || !passes_.outside(rank) ||
      hand_ins_.wants(rank)) {
    return Error(absl::StatusCode::kFailedPrecondition, rank, "EnterPass",
                 see_.committed->version() == 0  ? "the job has no parameters yet"
                 : see_.full_params->asked(rank) ? "the rank is inside EnterFullParams"
                 : hand_ins_.wants(rank)         ? "the rank is waiting to hand in"
                 : passes_.entering(rank)        ? "the rank is entering already"
                                                 : "the rank is inside one; LeavePass first");
  }
  if (see_.plan->writes_edits_back() && (stepped || !trainer_state->empty())) {
    return Error(absl::StatusCode::kUnimplemented, rank, "EnterPass",
                 "over several nodes, beside an optimizer of the daemon's, no pass commits a trainer state or a step; "
                 "give the state with Step");
  }
  SHARDD_RETURN_IF_ERROR(see_.extensions->CheckAllTakePart(rank, "EnterPass"));
  if (static_cast<int64_t>(trainer_state->size()) > kMaxTrainerStateBytes) {
    return Error(absl::StatusCode::kInvalidArgument, rank, "EnterPass",
                 absl::StrCat("trainer state is too large (got ", trainer_state->size(), ", want at most ",
                              kMaxTrainerStateBytes, " bytes)"));
  }
  if (stepped) {
    if (see_.steps->stepped(rank)) {
      return Error(absl::StatusCode::kFailedPrecondition, rank, "EnterPass", "the rank has sent Step for this step");
    }
    SHARDD_RETURN_IF_ERROR(see_.pairing->CheckClosed(rank, "EnterPass"));
  } else if (!trainer_state->empty()) {
    passes_.SetTrainerState(rank, std::move(*trainer_state));
  }
  passes_.Enter(rank, stepped, signal);
  hand_ins_.Close(rank);
  return absl::OkStatus();
}

void TrainerWrites::AsksToStore(int rank) {
  if (const auto& session = (*see_.sessions)[rank]; session == nullptr || session->words().told() == nullptr) {
    passes_.SetAsksToStore(rank);
  }
}

absl::Status TrainerWrites::HasEdits(int rank) {
  if (!see_.plan->writes_edits_back()) {
    return Error(absl::StatusCode::kFailedPrecondition, rank, "EnterPass",
                 "edits are written back over several nodes alone; HandIn first");
  }
  passes_.SetHasEdits(rank);
  return absl::OkStatus();
}

absl::Status TrainerWrites::LeavePass(int rank) {
  SHARDD_RETURN_IF_ERROR(CheckTrainersWrite(rank, "LeavePass"));
  if (!passes_.inside(rank)) {
    return Error(absl::StatusCode::kFailedPrecondition, rank, "LeavePass", "the rank is not inside a pass");
  }
  passes_.Leave(rank);
  return absl::OkStatus();
}

absl::Status TrainerWrites::AskToHandIn(int rank) {
  SHARDD_RETURN_IF_ERROR(CheckTrainersWrite(rank, "HandIn"));
  if (see_.plan->writes_edits_back()) {
    return Error(absl::StatusCode::kFailedPrecondition, rank, "HandIn",
                 "over several nodes edits are written back; EnterFullParams with writeback");
  }
  if (see_.committed->version() == 0 || see_.full_params->asked(rank) || !passes_.outside(rank) ||
      hand_ins_.wants(rank) || hand_ins_.open(rank)) {
    return Error(absl::StatusCode::kFailedPrecondition, rank, "HandIn",
                 see_.committed->version() == 0                  ? "the job has no parameters yet"
                 : see_.full_params->asked(rank)                 ? "the rank is inside EnterFullParams"
                 : hand_ins_.open(rank) || hand_ins_.wants(rank) ? "the rank has asked for it already"
                                                                 : "the rank is inside a pass; LeavePass first");
  }
  if (!pass_copies()) {  // else it waits for nobody but who reads full parameters
    SHARDD_RETURN_IF_ERROR(see_.extensions->CheckAllTakePart(rank, "HandIn"));
  }
  hand_ins_.Ask(rank);
  return absl::OkStatus();
}

void TrainerWrites::Step(int rank) {
  passes_.Leave(rank);
  hand_ins_.CloseWithStep(rank);
}

absl::StatusOr<bool> TrainerWrites::StepComesFirst() const {
  if (const int one = see_.steps->First(/*stepped=*/true); one >= 0) {
    const int other = see_.steps->First(/*stepped=*/false);
    if (other < 0) {
      return true;
    }
    return Error(absl::StatusCode::kFailedPrecondition, other, "EnterPass",
                 absl::StrCat("the rank enters a pass without the Step that rank ", one, " has sent"));
  }
  const bool stepped = passes_.stepped(0);
  for (int rank = 1; rank < world_size(); ++rank) {
    if (passes_.stepped(rank) != stepped) {
      return Error(absl::StatusCode::kFailedPrecondition, rank, "EnterPass",
                   absl::StrCat("ranks differ in whether they made an optimizer step (got ", !stepped, " on rank ",
                                rank, ", ", stepped, " on rank 0)"));
    }
  }
  return false;
}

bool TrainerWrites::NoStepComesFirst() const {
  const absl::StatusOr<bool> step_first = StepComesFirst();
  return !step_first.ok() || !*step_first;
}

std::vector<int> TrainerWrites::LateRanks(WaitsFor waits_for) const {
  int furthest = 0;  // backwards that somebody has closed who is still inside, or has stepped
  std::vector<int> wanted;
  for (int rank = 0; rank < world_size(); ++rank) {
    if (passes_.inside(rank) || see_.steps->stepped(rank)) {
      furthest = std::max(furthest, see_.pairing->closed(rank));
    }
    // Each step that a rank makes looks again, so a few at a time will do.
    if (passes_.inside(rank) && see_.pairing->sleeps(rank) && wanted.size() < kMostBlockedAtOnce) {
      wanted.push_back(waits_for(rank).rank);
    }
  }
  std::vector<int> late;
  for (int rank = 0; rank < world_size(); ++rank) {
    if (passes_.entering(rank) && !passes_.stepped(rank) &&
        (see_.pairing->closed(rank) < furthest || std::find(wanted.begin(), wanted.end(), rank) != wanted.end())) {
      late.push_back(rank);
    }
  }
  return late;
}

void TrainerWrites::ReadmitLate(WaitsFor waits_for) {
  for (const int rank : LateRanks(waits_for)) {
    passes_.Readmit(rank);
    if (const auto& session = (*see_.sessions)[rank]; session != nullptr) {
      if (pass_copies()) {
        session->words().PublishPassIssued();
      }
      session->words().PublishPass();
    }
  }
}

void TrainerWrites::Announce(bool tell, bool takes_snapshot) {
  passes_.Announce(tell, takes_snapshot);
  for (const auto& session : *see_.sessions) {
    if (session != nullptr && tell) session->words().PublishPassIssued();
  }
}

void TrainerWrites::CommitPass() {
  passes_.StepsCommitted();
  if (pass_copies()) passes_.CopiesMade();
  CommitHandIns();
}

void TrainerWrites::CommitHandIns() {
  if (hand_ins_.Commit()) counters_->set_hand_ins(counters_->hand_ins() + 1);
}

// The step's trainer states are newer, and what was handed in is in the version with it.
void TrainerWrites::StepCommitted() {
  passes_.ForgetTrainerStates();
  CommitHandIns();
}

void TrainerWrites::LetInAll(bool to_write_back) {
  counters_->set_passes(counters_->passes() + 1);
  const bool news = passes_.announced() && !passes_.told();
  passes_.LetInAll();
  for (const auto& session : *see_.sessions) {
    if (session == nullptr) continue;
    if (news) session->words().PublishPassIssued();
    if (to_write_back) session->words().PublishHandIn();  // whoever sees the pass sees it, too
    session->words().PublishPass();
  }
}

Wait TrainerWrites::WaitingToEnter(int rank) const {
  return passes_.entering(rank)
             ? FirstOther(world_size(), rank, "EnterPass", [this](int other) { return !passes_.entering(other); })
             : Wait();
}

bool TrainerWrites::MayHandIn() const {
  if (see_.snapshot->taking() || see_.full_params->AnyAsked()) {
    return false;
  }
  bool some_want = false;
  for (int rank = 0; rank < world_size(); ++rank) {
    if (passes_.inside(rank)) {
      return false;
    }
    some_want = some_want || (hand_ins_.wants(rank) && !see_.steps->stepped(rank));
  }
  return some_want;
}

void TrainerWrites::LetHandIn() {
  for (int rank = 0; rank < world_size(); ++rank) {
    if (hand_ins_.wants(rank) && !see_.steps->stepped(rank)) {
      hand_ins_.Open(rank);
      if (const auto& session = (*see_.sessions)[rank]; session != nullptr) session->words().PublishHandIn();
    }
  }
}

absl::Status TrainerWrites::CheckStuck(absl::Time now, WaitsFor waits_for) const {
  std::vector<bool> stuck(static_cast<size_t>(world_size()), false);
  int behind = -1;  // of them, who has closed the fewest backwards
  for (int rank = 0; rank < world_size() && !see_.plan->config.allow_missing_contribution(); ++rank) {
    if (hand_ins_.wants(rank) && now - (*see_.sessions)[rank]->last_command_time >= kStuckAfter) {
      stuck[rank] = true;
      behind = behind < 0 || see_.pairing->closed(rank) < see_.pairing->closed(behind) ? rank : behind;
    }
  }
  const int64_t first = absl::ToUnixMillis(now) / 100 * static_cast<int64_t>(kMostBlockedAtOnce);
  size_t asked = 0;
  for (int i = 0; i < world_size() && behind >= 0; ++i) {
    // Who is asked for whom it waits costs more: a few at a time, others with the next tick.
    const int reader = static_cast<int>((first + i) % world_size());
    if (!passes_.inside(reader)) {
      continue;
    }
    int rank = see_.pairing->closed(reader) > see_.pairing->closed(behind) ? behind : -1;
    if (rank < 0 && see_.pairing->sleeps(reader) && asked++ < kMostBlockedAtOnce) {
      const int waited_for = waits_for(reader).rank;
      rank = waited_for >= 0 && stuck[waited_for] ? waited_for : -1;
    }
    if (rank >= 0) {
      return Error(absl::StatusCode::kFailedPrecondition, rank, "HandIn",
                   absl::StrCat("the rank writes parameters between a forward and its backward, for whose gradients "
                                "rank ",
                                reader, " waits; write after the backward"));
    }
  }
  return absl::OkStatus();
}

void TrainerWrites::LetStore() {
  for (int rank = 0; rank < world_size(); ++rank) {
    if (hand_ins_.LetStore(rank)) {
      if (const auto& session = (*see_.sessions)[rank]; session != nullptr) session->words().PublishHandIn();
    }
  }
}

Wait TrainerWrites::WaitingToHandIn(int rank) const {
  return hand_ins_.wants(rank) && !pass_copies()
             ? FirstOther(world_size(), rank, "LeavePass", [this](int other) { return passes_.inside(other); })
             : Wait();
}

Wait TrainerWrites::WaitingToStore(int rank) const {
  return hand_ins_.wants(rank) && pass_copies()
             ? FirstOther(world_size(), rank, "LeaveFullParams",
                          [this](int other) { return see_.full_params->inside(other); })
             : Wait();
}

void TrainerWrites::Forget(int rank) {
  passes_.Forget(rank);
  hand_ins_.Forget(rank);
}

void TrainerWrites::EndEpoch() {
  passes_.EndEpoch();
  hand_ins_.EndEpoch();
}

absl::Status TrainerWrites::Error(absl::StatusCode code, int rank, absl::string_view what,
                                  absl::string_view fact) const {
  return see_.committed->RankError(code, rank, what, fact);
}

}  // namespace shardd
