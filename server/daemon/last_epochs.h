#ifndef SHARDD_SERVER_DAEMON_LAST_EPOCHS_H_
#define SHARDD_SERVER_DAEMON_LAST_EPOCHS_H_

#include <atomic>
#include <cstdint>
#include <map>

#include "server/job/job_core.h"

namespace shardd {

// How a daemon ends: it finishes the running step of jobs that the next daemon goes on with. Whoever takes part in such
// a step may still come; everybody else is to go to the next daemon. Loop-confined, but for the first two.
class LastEpochs {
 public:
  // False if they had begun before.
  bool Begin() { return !begun_.exchange(true); }
  bool begun() const { return begun_; }

  // The job's epoch is to end behind a step.
  void Add(const JobCore& job) { epochs_[job.identity().id] = job.committed().epoch(); }
  // It has ended, or nobody waits for that any more.
  void Remove(const JobCore& job) { epochs_.erase(job.identity().id); }
  void Clear() { epochs_.clear(); }
  // ... and has not yet.
  bool Has(const JobCore& job) const {
    const auto it = epochs_.find(job.identity().id);
    return it != epochs_.end() && it->second == job.committed().epoch() && job.sessions().attached() > 0;
  }
  // False: a rank of the job is to come to the next daemon.
  bool MayCome(const JobCore& job) const { return !begun_ || Has(job); }

  // What is there still goes on with the next daemon, which needs what the custodian has of it.
  void LeaveJobs() { leaves_jobs_ = true; }
  bool leaves_jobs() const { return leaves_jobs_; }

 private:
  std::atomic<bool> begun_ = false;
  std::map<uint64_t, uint64_t> epochs_;  // by job
  bool leaves_jobs_ = false;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_DAEMON_LAST_EPOCHS_H_
