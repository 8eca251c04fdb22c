#include "server/daemon/freed_jobs.h"

#include <algorithm>
#include <utility>

namespace shardd {
namespace {

constexpr size_t kMostJobs = 256;
constexpr absl::Duration kAwaited = absl::Minutes(15);

}  // namespace

void FreedJobs::Add(const std::string& name, const Tenant& owner, v1::LostJob lost, absl::Time now) {
  Forget(name, owner.uid);
  if (jobs_.size() == kMostJobs) {
    jobs_.pop_front();
  }
  jobs_.push_back({name, owner, std::move(lost), now});
}

const v1::LostJob* FreedJobs::Find(const std::string& name, const Tenant& caller) const {
  const auto it = std::find_if(jobs_.begin(), jobs_.end(),
                               [&](const Freed& freed) { return freed.name == name && freed.owner.Admits(caller); });
  return it == jobs_.end() ? nullptr : &it->lost;
}

void FreedJobs::Forget(const std::string& name, uint32_t uid) {
  jobs_.erase(std::remove_if(jobs_.begin(), jobs_.end(),
                             [&](const Freed& freed) { return freed.name == name && freed.owner.uid == uid; }),
              jobs_.end());
}

void FreedJobs::Replace(uint64_t id, uint64_t successor) {
  if (replaced_.size() == kMostJobs) {
    replaced_.pop_front();
  }
  replaced_.emplace_back(id, successor);
}

bool FreedJobs::replaced(uint64_t id) const { return Newest(id) != id; }

uint64_t FreedJobs::Newest(uint64_t id) const {
  for (const auto& [replaced, successor] : replaced_) {  // in the order in which they came
    if (replaced == id) id = successor;
  }
  return id;
}

bool FreedJobs::Awaits(absl::Time now) const { return !jobs_.empty() && now - jobs_.back().time < kAwaited; }

}  // namespace shardd
