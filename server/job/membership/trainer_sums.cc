#include "server/job/membership/trainer_sums.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/collective/trainers/sum_channel.h"
#include "server/job/membership/past_process.h"
#include "server/session/session.h"

namespace shardd {

void TrainerSums::SessionBegins(const Session& session) {
  collective_->SetSlots(session.rank(), session.memory()->slots);
  if (trainers_ != nullptr) {
    trainers_->SetSession(session.rank(), session.id(), session.sums());
  }
}

void TrainerSums::SessionEnds(Session* session) {
  collective_->SetSlots(session->rank(), nullptr);
  if (trainers_ == nullptr) {
    return;
  }
  trainers_->SetSession(session->rank(), 0, nullptr);
  if (session->sums() != nullptr && !session->sums()->idle()) {
    stragglers_.push_back({session->rank(), session->peer, std::move(session->pidfd), session->sums()});
  }
}

std::vector<TrainerSums::Straggler> TrainerSums::TakeDone() {
  const auto done = std::stable_partition(stragglers_.begin(), stragglers_.end(), [](const Straggler& straggler) {
    return !straggler.sums->idle() && !HasEnded(straggler.pidfd, straggler.peer.pid);
  });
  std::vector<Straggler> taken(std::make_move_iterator(done), std::make_move_iterator(stragglers_.end()));
  stragglers_.erase(done, stragglers_.end());
  return taken;
}

AttachAnswer TrainerSums::MayAttach(const std::string& what, int rank, int32_t pid, bool replace) const {
  AttachAnswer answer;
  const auto straggler =
      std::find_if(stragglers_.begin(), stragglers_.end(), [rank](const Straggler& of) { return of.rank == rank; });
  if (straggler == stragglers_.end()) {
    return answer;
  }
  const std::string why =
      absl::StrCat("sums of its last session (pid ", straggler->peer.pid, ") are still under way on its GPU");
  answer.status =
      absl::AbortedError(absl::StrCat(what, why, "; attach again, with replace where that process does not end"));
  if (replace && (pid == 0 || straggler->peer.pid != pid)) {
    if (const absl::Status killed = KillProcess(straggler->pidfd, straggler->peer.pid, straggler->peer.uid);
        !killed.ok()) {
      answer.status = absl::AbortedError(absl::StrCat(what, why, "; attach again"));
      answer.renew = absl::StrCat(why, " (", killed.message(), ")");
    }
  }
  return answer;
}

TrainerCollective::Late TrainerSums::FindLate(absl::Time now, absl::Duration limit) const {
  return trainers_ == nullptr ? TrainerCollective::Late() : trainers_->FindLate(now, limit);
}

}  // namespace shardd
