#include "server/collective/nodes/nccl/node_turns.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace shardd {

absl::StatusOr<std::shared_ptr<NodeTurns::Seat>> NodeTurns::Enter(const std::string& job,
                                                                  const std::vector<std::string>& addresses) {
  absl::MutexLock lock(&mutex_);
  const auto refused = [&](const auto&... why) {
    return absl::FailedPreconditionError(absl::StrCat("open job \"", job, "\": ", why...));
  };
  if (seats_.size() == kMostJobs) {
    return refused("NCCL adds gradients over nodes for at most two jobs at a time on a daemon's GPUs (there: \"",
                   seats_[0]->job_, "\" and \"", seats_[1]->job_,
                   "\"); close one of them, or use daemons on other GPUs");
  }
  for (const Seat* const seat : seats_) {
    if (seat->job_ == job) {
      return refused(
          "NCCL adds gradients over nodes for a job of this name already; close that one, or give this one "
          "another name");
    }
    if (addresses != addresses_) {
      return refused("two jobs on a daemon's GPUs must have the same nodes in the same order (got ",
                     absl::StrJoin(addresses, ","), ", want ", absl::StrJoin(addresses_, ","), " as job \"", seat->job_,
                     "\" has them); name the nodes so, close that job, or use daemons on other GPUs");
    }
  }
  addresses_ = addresses;
  std::shared_ptr<Seat> seat(new Seat(shared_from_this(), job));
  seats_.push_back(seat.get());
  SettleLocked();
  return seat;
}

void NodeTurns::SettleLocked() {
  for (Seat* const seat : seats_) {
    if (holder_ == nullptr && seat->wants_ && seat != last_) holder_ = seat;
  }
  for (Seat* const seat : seats_) {
    if (holder_ == nullptr && seat->wants_) holder_ = seat;
  }
  for (Seat* const seat : seats_) {
    View view;
    view.mine = seat == holder_;
    view.alone = std::none_of(seats_.begin(), seats_.end(),
                              [seat](const Seat* other) { return other != seat && other->has_wanted_; });
    view.wanted =
        std::any_of(seats_.begin(), seats_.end(), [seat](const Seat* other) { return other != seat && other->wants_; });
    if (view == seat->seen_) continue;
    seat->seen_ = view;
    if (seat->changed_ != nullptr) seat->changed_(view);
  }
}

void NodeTurns::Seat::Watch(Changed changed) {
  absl::MutexLock lock(&of_->mutex_);
  changed_ = std::move(changed);
  changed_(seen_);
}

void NodeTurns::Seat::Want(bool wants) {
  absl::MutexLock lock(&of_->mutex_);
  if (of_->holder_ == this) return;
  wants_ = wants;
  has_wanted_ = has_wanted_ || wants;
  of_->SettleLocked();
}

void NodeTurns::Seat::Release() {
  absl::MutexLock lock(&of_->mutex_);
  wants_ = false;
  if (of_->holder_ == this) {
    of_->holder_ = nullptr;
    of_->last_ = this;
  }
  of_->SettleLocked();
}

std::string NodeTurns::Seat::Other() const {
  absl::MutexLock lock(&of_->mutex_);
  for (const Seat* const seat : of_->seats_) {
    if (seat != this) return seat->job_;
  }
  return "";
}

void NodeTurns::Seat::Leave() {
  absl::MutexLock lock(&of_->mutex_);
  changed_ = nullptr;
  wants_ = false;
  if (of_->holder_ == this) of_->holder_ = nullptr;
  if (of_->last_ == this) of_->last_ = nullptr;
  auto& seats = of_->seats_;
  seats.erase(std::remove(seats.begin(), seats.end(), this), seats.end());
  of_->SettleLocked();
}

}  // namespace shardd
