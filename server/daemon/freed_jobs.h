#ifndef SHARDD_SERVER_DAEMON_FREED_JOBS_H_
#define SHARDD_SERVER_DAEMON_FREED_JOBS_H_

#include <cstdint>
#include <deque>
#include <string>

#include "absl/time/time.h"
#include "common/clock/monotonic_now.h"
#include "server/tenant/tenant.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

// The newest jobs that had committed something and were freed because no rank came, and those whose place others have
// taken: for whoever comes too late.
// Loop-confined.
class FreedJobs {
 public:
  // `now` as MonotonicNow. The one before of the user's jobs of that name is forgotten, and where there are too many,
  // the oldest of the user who has most.
  void Add(const std::string& name, const Tenant& owner, v1::LostJob lost, absl::Time now);
  // Null: none whose owner admits the caller.
  const v1::LostJob* Find(const std::string& name, const Tenant& caller) const;
  void Forget(const std::string& name, uint32_t uid);
  // `successor`, of its name, has taken the job's place. The oldest are forgotten likewise: their ranks have long come
  // again.
  void Replace(uint64_t id, uint64_t successor, uint32_t uid);
  bool replaced(uint64_t id) const;
  // What goes on in the job's place; the job itself where nothing does, or that is forgotten.
  uint64_t Newest(uint64_t id) const;
  // Some were freed so lately that their ranks may still come.
  bool Awaits(absl::Time now) const;

 private:
  struct Freed {
    std::string name;
    Tenant owner;
    v1::LostJob lost;
    absl::Time time;
  };
  struct Replaced {
    uint64_t id;
    uint64_t successor;
    uint32_t uid;
  };
  std::deque<Freed> jobs_;         // oldest first
  std::deque<Replaced> replaced_;  // likewise
};

}  // namespace shardd

#endif  // SHARDD_SERVER_DAEMON_FREED_JOBS_H_
