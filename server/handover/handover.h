#ifndef SHARDD_SERVER_HANDOVER_HANDOVER_H_
#define SHARDD_SERVER_HANDOVER_HANDOVER_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/custodian/custody.h"
#include "server/daemon/jobs_source.h"

namespace shardd {

// The part of a daemon that gives its place to another one. Thread-safe.
class Handover {
 public:
  // All outlive this. `custody` null: jobs end with the daemon. `embedded`: its trainers start the next one. `stop`
  // begins the shutdown that ends with Complete; any thread, must not block.
  Handover(JobsSource* jobs, std::shared_ptr<Custody> custody, bool embedded, std::function<void()> stop);

  // The call of the next daemon, which is answered by Complete. Errors change nothing. PERMISSION_DENIED: the caller
  // is no administrator. FAILED_PRECONDITION: jobs would end with this daemon, or another one takes its place already.
  void Ask(const Caller& caller, const v1::HandOverRequest& request, JobsSource::Done<v1::HandOverResponse> done)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether Complete has, or will have, somebody to answer.
  bool asked() const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return asked_;
  }
  // For people, and shardctl: Daemon.handover.
  std::string state() const ABSL_LOCKS_EXCLUDED(mutex_);
  void SetState(std::string state) ABSL_LOCKS_EXCLUDED(mutex_);
  // The daemon ends anyway: who asks from here on waits for Complete.
  void BeginStop() ABSL_LOCKS_EXCLUDED(mutex_);
  // Lets go of what the custodian keeps, and answers the next daemon, if one has asked. `memory_is_quiet`: nothing
  // writes into jobs' memory any more. Where something may, this process ends at once, and the next daemon begins then.
  // REQUIRES: the socket is free.
  void Complete(bool memory_is_quiet) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  JobsSource* const jobs_;
  const std::shared_ptr<Custody> custody_;
  const std::string impossible_;  // why; empty: it is not
  const std::function<void()> stop_;
  mutable absl::Mutex mutex_;
  std::string state_ ABSL_GUARDED_BY(mutex_);
  bool asked_ ABSL_GUARDED_BY(mutex_) = false;
  bool stops_ ABSL_GUARDED_BY(mutex_) = false;
  JobsSource::Done<v1::HandOverResponse> done_ ABSL_GUARDED_BY(mutex_);  // null: nobody waits for an answer
};

}  // namespace shardd

#endif  // SHARDD_SERVER_HANDOVER_HANDOVER_H_
