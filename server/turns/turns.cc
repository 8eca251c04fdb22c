#include "server/turns/turns.h"

#include <algorithm>
#include <iterator>

namespace shardd {

void FairShares::Enter(uint64_t id) {
  Sharer& sharer = sharers_[id];
  if (sharer.busy) return;
  sharer.busy = true;
  ++busy_;
  sharer.used = std::max(sharer.used, turn_ - most_saved_);
}

void FairShares::Leave(uint64_t id) {
  const auto left = sharers_.find(id);
  if (left == sharers_.end() || !left->second.busy) return;
  left->second.busy = false;
  --busy_;
  const bool all = sharers_.size() - busy_ > kMostIdle;
  for (auto it = sharers_.begin(); it != sharers_.end();) {
    const Sharer& sharer = it->second;
    it = !sharer.busy && (all || sharer.used <= turn_ - most_saved_) ? sharers_.erase(it) : std::next(it);
  }
}

void FairShares::Charge(uint64_t id, int64_t cost) { sharers_.at(id).used += cost; }

std::optional<uint64_t> FairShares::Next(absl::FunctionRef<bool(uint64_t)> ready) const {
  std::optional<uint64_t> next;
  int64_t least = 0;
  for (const auto& [id, sharer] : sharers_) {
    if (!sharer.busy || (next.has_value() && sharer.used >= least) || !ready(id)) continue;
    next = id;
    least = sharer.used;
  }
  return next;
}

void FairShares::Served(uint64_t id) { turn_ = std::max(turn_, sharers_.at(id).used); }

void Turns::Enter(WorkOwner owner) {
  users_.Enter(owner.uid);
  jobs_.try_emplace(owner.uid, most_saved_).first->second.Enter(owner.job);
}

void Turns::Leave(WorkOwner owner) {
  const auto user = jobs_.find(owner.uid);
  if (user == jobs_.end()) return;
  user->second.Leave(owner.job);
  if (!user->second.idle()) return;
  users_.Leave(owner.uid);
  jobs_.erase(user);  // what its jobs have used among themselves is of no use without work
}

void Turns::Charge(WorkOwner owner, int64_t cost) {
  users_.Charge(owner.uid, cost);
  jobs_.at(owner.uid).Charge(owner.job, cost);
}

std::optional<WorkOwner> Turns::Next(absl::FunctionRef<bool(WorkOwner)> ready) {
  std::optional<WorkOwner> next;
  const auto next_of = [&](uint64_t uid) {
    const uint32_t user = static_cast<uint32_t>(uid);
    const std::optional<uint64_t> job = jobs_.at(user).Next([&](uint64_t id) { return ready(WorkOwner{user, id}); });
    if (job.has_value()) next = WorkOwner{user, *job};
    return job.has_value();
  };
  // The last for which it says yes is the one that has used least.
  if (!users_.Next(next_of).has_value()) return std::nullopt;
  users_.Served(next->uid);
  jobs_.at(next->uid).Served(next->job);
  return next;
}

}  // namespace shardd
