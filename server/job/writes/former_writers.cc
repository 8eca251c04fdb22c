#include "server/job/writes/former_writers.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/job/membership/past_process.h"

namespace shardd {

void FormerWriters::Begin(absl::Time now) {
  writers_.clear();
  since_ = now;
  waiting_ = true;
}

void FormerWriters::Add(int rank, int32_t pid, UniqueFd process) {
  writers_.push_back({rank, pid, std::move(process)});
}

std::string FormerWriters::Names() const {
  return absl::StrJoin(writers_, ", ", [](std::string* out, const Writer& writer) {
    absl::StrAppend(out, "rank ", writer.rank, " (pid ", writer.pid, ")");
  });
}

std::string FormerWriters::Attaching(int rank, int32_t pid, const UniqueFd& process, bool replace, bool on_devices,
                                     absl::Time now) {
  const bool speaks_for_all = !on_devices && now - since_ >= kMostWaitForOwnRanks;
  std::string not_killed;
  for (auto it = writers_.begin(); it != writers_.end();) {
    const bool known = CanBeTold(it->process, it->pid, process, pid);
    const bool same = known ? AreOneProcess(it->process, it->pid, process, pid) : it->rank == rank;
    // Who is replaced may be stopped, or not know yet: it must not store again.
    const bool kills = replace && it->rank == rank && it->process.valid() && !(known && same);
    if (const absl::Status killed = kills ? KillProcess(it->process, it->pid, uid_) : absl::OkStatus(); !killed.ok()) {
      not_killed = std::string(killed.message());
    }
    // With replace it may be a process whose session was live until this very call, and that has not given it up yet.
    const bool gave_up = it->told || !replace;
    const bool is_back = !kills && ((it->rank == rank && ((same && gave_up) || !it->process.valid())) ||
                                    (speaks_for_all && it->told && known && same));
    if (is_back || HasEnded(it->process, it->pid)) {
      it = writers_.erase(it);
      continue;
    }
    it->told = it->told || same;
    ++it;
  }
  return not_killed;
}

}  // namespace shardd
