#ifndef SHARDD_SERVER_DAEMON_TAKE_UP_JOB_CUSTODY_H_
#define SHARDD_SERVER_DAEMON_TAKE_UP_JOB_CUSTODY_H_

// Jobs that outlive their daemon: what of them is handed to the custodian before they exist for anybody, and what the
// next daemon makes of it.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/custodian/custody.h"
#include "server/daemon/take_up/taken_up_job.h"
#include "server/job/job_core.h"

namespace shardd {

// Thread-safe. All methods block.
class JobCustody {
 public:
  // `custody` null: nothing is kept, and nothing is there.
  explicit JobCustody(std::shared_ptr<Custody> custody) : custody_(std::move(custody)) {}

  // Jobs that will be kept.
  bool Keeps(const ShardPlan& plan) const { return custody_ != nullptr && OutlivesDaemon(plan); }
  // UNAVAILABLE: the custodian does not answer, and the job is not to be. A job on GPUs whose driver does not let
  // another process have its memory ends with this daemon; the log says so, and Warning() from then on.
  absl::Status HandOver(int node, const std::string& link_key, JobCore::Init* init) const;
  // Which jobs end with this daemon though it has a custodian, and why; empty: none was found.
  std::string Warning() const;
  // Looks whether the custodian is still the one that has everything, and hands it to another. Every second or so.
  void Review() const;
  // The job has ended.
  void Drop(uint64_t job) const;
  // What the daemon before has left of each job, for LeftJob: by id, in the order in which they were opened.
  // Once. The custodian has it still, also behind an error. UNAVAILABLE: that daemon has not ended, and this one is on
  // GPUs.
  absl::StatusOr<std::vector<std::pair<uint64_t, JobMemory::Kept>>> TakeUp(bool on_gpus) const;
  // The same of one job, again. REQUIRES: nothing else goes on with it.
  absl::StatusOr<JobMemory::Kept> LeftOf(uint64_t job) const;

 private:
  const std::shared_ptr<Custody> custody_;
  mutable absl::Mutex mutex_;
  mutable std::string why_gpus_end_ ABSL_GUARDED_BY(mutex_);  // of the last such job; empty: there was none
};

}  // namespace shardd

#endif  // SHARDD_SERVER_DAEMON_TAKE_UP_JOB_CUSTODY_H_
