// What trainers add (JobConfig.trainer_sums): sessions and the collective that tells them, and what becomes of sums
// that are under way when a session ends.
//
// A sum that a rank's GPU has in its queue may be made after the epoch has ended, whoever was killed. It writes that
// rank's part of the gradient shards and nothing else, and nobody but a session of that rank, or its device while it
// has none, writes or zeroes that part in a later epoch before the rank's next session is there. So that one is not
// given before the last one is known to write no more: its sums are there, its library has said so, or its process has
// ended, and with it its contexts. What the part holds then does not matter: nothing in it is present in a new epoch,
// so the first sum overwrites it.

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/job/job_core.h"

namespace shardd {

void JobCore::SessionHasSums(int rank) {
  collective_->SetSlots(rank, sessions_[rank]->memory()->slots);
  if (trainers_ != nullptr) {
    trainers_->SetSession(rank, sessions_[rank]->id(), sessions_[rank]->sums());
  }
}

void JobCore::SessionHasNoSums(int rank) {
  collective_->SetSlots(rank, nullptr);
  if (trainers_ == nullptr) {
    return;
  }
  Session* session = sessions_[rank].get();
  trainers_->SetSession(rank, 0, nullptr);
  if (session->sums() != nullptr && !session->sums()->idle()) {
    stragglers_.push_back({rank, session->peer, std::move(session->pidfd), session->sums()});
  }
}

bool JobCore::PollSums() {
  if (trainers_ == nullptr || !trainers_->waiting()) {
    return false;
  }
  const bool found = trainers_->Poll();
  PollNoMore();
  return found;
}

// A process that has ended has no contexts any more, so nothing of it is in a GPU's queue.
void JobCore::ForgetStragglers() {
  if (stragglers_.empty()) {
    return;
  }
  const auto gone = std::stable_partition(stragglers_.begin(), stragglers_.end(), [](const Straggler& straggler) {
    return !straggler.sums->idle() && !HasEnded(straggler.pidfd, straggler.peer.pid);
  });
  if (gone != stragglers_.end()) {  // with the memory of sessions
    memory_worker_->Post(
        [rest = std::vector<Straggler>(std::make_move_iterator(gone), std::make_move_iterator(stragglers_.end()))] {});
    stragglers_.erase(gone, stragglers_.end());
  }
}

absl::Status JobCore::CheckStragglers(int rank, int32_t pid, bool replace) {
  ForgetStragglers();
  for (const Straggler& straggler : stragglers_) {
    if (straggler.rank != rank) {
      continue;
    }
    const std::string what = absl::StrCat("attach rank ", rank, " of job \"", name(), "\": ");
    const std::string why =
        absl::StrCat("sums of its last session (pid ", straggler.peer.pid, ") are still under way on its GPU");
    if (replace && (pid == 0 || straggler.peer.pid != pid)) {
      if (const absl::Status killed = KillProcess(straggler.pidfd, straggler.peer.pid); !killed.ok()) {
        // Nothing may ever tell that they have been made: they go into the old shards.
        return renewing_gradients_ ? absl::AbortedError(absl::StrCat(what, why, "; attach again"))
                                   : RenewGradients(what, absl::StrCat(why, " (", killed.message(), ")"));
      }
    }
    return absl::AbortedError(absl::StrCat(what, why, "; attach again, with replace where that process does not end"));
  }
  return absl::OkStatus();
}

absl::StatusOr<int> JobCore::SlotsOfPeer(FdRange range) const {
  const uint32_t rank = range.first - kFdFirstPeerSlots;
  if (trainers_ == nullptr || range.count != 1 || rank >= static_cast<uint32_t>(world_size())) {
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
  if (trainers_ == nullptr) {
    return absl::OkStatus();
  }
  const auto late = trainers_->FindLate(now, absl::Milliseconds(plan_->config.silence_timeout_ms()));
  if (late.rank < 0) {
    return absl::OkStatus();
  }
  *rank = late.rank;
  return RankError(
      absl::StatusCode::kDeadlineExceeded, late.rank, late.what,
      absl::StrCat("rank ", late.rank, " has not added its part on ", devices_[late.rank]->name(), " after ",
                   absl::FormatDuration(late.since), " (got ", late.summed, " operations, want ", late.told,
                   "; last command: ",
                   sessions_[late.rank] == nullptr ? std::string("none") : sessions_[late.rank]->last_command, ")"));
}

}  // namespace shardd
