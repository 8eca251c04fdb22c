#include "server/daemon/freed_jobs.h"

#include <algorithm>
#include <map>
#include <utility>

namespace shardd {
namespace {

constexpr size_t kMostJobs = 256;
constexpr absl::Duration kAwaited = absl::Minutes(15);

// The oldest of whoever has most goes, so that nobody takes another's place.
template <typename Entry, typename UidOf>
void MakeRoom(std::deque<Entry>& entries, UidOf uid_of) {
  if (entries.size() < kMostJobs) return;
  std::map<uint32_t, int> counts;
  for (const Entry& entry : entries) ++counts[uid_of(entry)];
  const auto most =
      std::max_element(counts.begin(), counts.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  entries.erase(
      std::find_if(entries.begin(), entries.end(), [&](const Entry& entry) { return uid_of(entry) == most->first; }));
}

}  // namespace

void FreedJobs::Add(const std::string& name, const Tenant& owner, v1::LostJob lost, absl::Time now) {
  Forget(name, owner.uid);
  MakeRoom(jobs_, [](const Freed& freed) { return freed.owner.uid; });
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

void FreedJobs::Replace(uint64_t id, uint64_t successor, uint32_t uid) {
  MakeRoom(replaced_, [](const Replaced& replaced) { return replaced.uid; });
  replaced_.push_back({id, successor, uid});
}

bool FreedJobs::replaced(uint64_t id) const { return Newest(id) != id; }

uint64_t FreedJobs::Newest(uint64_t id) const {
  for (const Replaced& replaced : replaced_) {  // in the order in which they came
    if (replaced.id == id) id = replaced.successor;
  }
  return id;
}

bool FreedJobs::Awaits(absl::Time now) const { return !jobs_.empty() && now - jobs_.back().time < kAwaited; }

}  // namespace shardd
