#include "server/daemon/early_refusals.h"

#include <algorithm>
#include <utility>

#include "server/job/membership/absent_ranks.h"

namespace shardd {

void EarlyRefusals::Add(const std::string& job, const Tenant& caller, Refusal refusal, absl::Time now) {
  if (refusal.rank < 0 || !IsFinalRefusal(refusal.status)) {
    return;
  }
  DropOld(now);
  entries_.erase(std::remove_if(entries_.begin(), entries_.end(),
                                [&](const Entry& entry) {
                                  return entry.job == job && entry.caller == caller &&
                                         entry.refusal.rank == refusal.rank;
                                }),
                 entries_.end());
  if (entries_.size() == kMost) {
    // A user who has many takes no other's place; where the user has none, the oldest goes.
    const auto own = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const Entry& entry) { return entry.caller.uid == caller.uid; });
    entries_.erase(own != entries_.end() ? own : entries_.begin());
  }
  entries_.push_back({job, caller, std::move(refusal), now});
}

std::vector<EarlyRefusals::Refusal> EarlyRefusals::Take(const std::string& job, const Tenant& owner, absl::Time now) {
  DropOld(now);
  std::vector<Refusal> taken;
  for (auto it = entries_.begin(); it != entries_.end();) {
    if (it->job == job && owner.Admits(it->caller)) {
      taken.push_back(std::move(it->refusal));
      it = entries_.erase(it);
    } else {
      ++it;
    }
  }
  return taken;
}

void EarlyRefusals::DropOld(absl::Time now) {
  while (!entries_.empty() && now - entries_.front().time >= AbsentRanks::kOneAttempt) {
    entries_.pop_front();
  }
}

}  // namespace shardd
