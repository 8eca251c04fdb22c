// What is looked at because trainers tell it in memory alone: sums that they make (membership/trainer_sums.h), and
// memory that their devices have done with (work/given_back.h).

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/job/job_core.h"

namespace shardd {

bool JobCore::PollSums() {
  if (!sums_.waiting()) {
    return false;
  }
  const bool found = sums_.Poll();
  PollNoMore();
  return found;
}

void JobCore::PollNoMore() {
  if (given_back_.empty() && !sums_.waiting()) {
    poll_timer_.Off();
  }
}

bool JobCore::RunGivenBack() {
  bool found = false;
  const uint64_t epoch = committed_.epoch();
  for (absl::Status status; given_back_.RunNext(&status);) {
    found = true;
    if (!status.ok() && epoch == committed_.epoch()) {
      Abort(std::move(status), {});
    }
    Advance();
    if (epoch != committed_.epoch()) {
      return true;
    }
  }
  PollNoMore();
  return found;
}

void JobCore::DropGivenBack() {
  given_back_.Drop();
  poll_timer_.Stop();
}

absl::Status JobCore::CheckHeld(absl::Time now, int* rank) const {
  const GivenBack::Late late = given_back_.FindLate(now, absl::Milliseconds(plan_->config.silence_timeout_ms()));
  if (late.what.empty()) {
    return absl::OkStatus();
  }
  *rank = late.signal.rank;
  return committed_.RankError(
      absl::StatusCode::kDeadlineExceeded, *rank, late.what,
      absl::StrCat("the stream of rank ", *rank, " on ", devices_[*rank]->name(), " has not come to signal ",
                   late.signal.done, ", behind which it has given the memory back, after ",
                   absl::FormatDuration(late.since), " (last command: ", sessions_[*rank]->last_command, ")"));
}

void JobCore::ForgetStragglers() {
  if (auto gone = sums_.TakeDone(); !gone.empty()) {  // with the memory of sessions
    memory_worker_->Post([gone = std::move(gone)] {});
  }
}

absl::Status JobCore::CheckStragglers(int rank, int32_t pid, bool replace) {
  ForgetStragglers();
  const std::string what = absl::StrCat("attach rank ", rank, " of job \"", name(), "\": ");
  return Settle(rank, what, sums_.MayAttach(what, rank, pid, replace));
}

absl::StatusOr<int> JobCore::SlotsOfPeer(FdRange range) const {
  const uint32_t rank = range.first - kFdFirstPeerSlots;
  if (!sums_.by_trainers() || range.count != 1 || rank >= static_cast<uint32_t>(world_size())) {
    return absl::InvalidArgumentError(absl::StrCat("fd channel: no such descriptors (got ", range.count, " from ",
                                                   range.first, ", want 1 of the gradient slots of a rank of 0 to ",
                                                   world_size() - 1, " of a job with trainer_sums)"));
  }
  if (sessions_[rank] == nullptr || sessions_[rank]->memory()->slots == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("fd channel: rank ", rank, " has no session, and so no gradient slots"));
  }
  return sessions_[rank]->memory()->slots->pieces().front().fd;
}

absl::Status JobCore::CheckSums(absl::Time now, int* rank) {
  const auto late = sums_.FindLate(now, absl::Milliseconds(plan_->config.silence_timeout_ms()));
  if (late.rank < 0) {
    return absl::OkStatus();
  }
  *rank = late.rank;
  return committed_.RankError(
      absl::StatusCode::kDeadlineExceeded, late.rank, late.what,
      absl::StrCat("rank ", late.rank, " has not added its part on ", devices_[late.rank]->name(), " after ",
                   absl::FormatDuration(late.since), " (got ", late.summed, " operations, want ", late.told,
                   "; last command: ",
                   sessions_[late.rank] == nullptr ? std::string("none") : sessions_[late.rank]->last_command, ")"));
}

}  // namespace shardd
