#ifndef SHARDD_SERVER_DAEMON_TAKE_UP_TAKE_UPS_H_
#define SHARDD_SERVER_DAEMON_TAKE_UP_TAKE_UPS_H_

// Jobs of the daemon before that are taken up beside each other. One whose update that daemon has left may take
// minutes; this daemon then serves all others, and calls that name it wait.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/loop/core_loop.h"
#include "server/tenant/tenant.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

// Thread-safe.
class TakeUps {
 public:
  using Name = std::pair<uint32_t, std::string>;  // of the owner's uid
  // Blocks as long as it takes, off the loop.
  using TakeUp = absl::AnyInvocable<void()>;

  TakeUps() = default;
  ~TakeUps() { Stop(absl::InfiniteDuration()); }
  TakeUps(const TakeUps&) = delete;
  TakeUps& operator=(const TakeUps&) = delete;

  // Calls all of each name in their order, and those of several names at the same time. Returns when all have returned,
  // or, when those of all other names have called Describe, after `limit`. Once.
  void Begin(std::map<Name, std::vector<TakeUp>> jobs, absl::Duration limit);
  // Calls `then` when no job of the name is being taken up any more: at once, or on the thread that has done it.
  void WhenTakenUp(const Name& name, absl::AnyInvocable<void()> then);
  // Says of the job that is being taken up what ListJobs is to say meanwhile. Its ranks ask for it there.
  void Describe(Tenant owner, v1::Job job);
  void List(absl::FunctionRef<void(const Tenant& owner, const v1::Job& job)> say) const;
  // UNAVAILABLE: a job of the name is being taken up.
  absl::Status Check(absl::string_view what, const Name& name) const;
  // Names of jobs that are being taken up.
  size_t count() const;
  // Begins with no other job, and drops what waits. False: one is being taken up after `limit` still, and its thread is
  // left to it: this must then never be destroyed.
  bool Stop(absl::Duration limit);

 private:
  struct Waiting {
    std::vector<absl::AnyInvocable<void()>> then;
    std::optional<std::pair<Tenant, v1::Job>> described;
  };
  void Work();
  static bool AreDescribed(std::map<Name, Waiting>* waiting);

  mutable absl::Mutex mutex_;
  std::deque<std::pair<Name, std::vector<TakeUp>>> queued_ ABSL_GUARDED_BY(mutex_);
  std::map<Name, Waiting> waiting_ ABSL_GUARDED_BY(mutex_);  // of those that are queued or under way
  std::vector<std::unique_ptr<CoreLoop>> threads_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_DAEMON_TAKE_UP_TAKE_UPS_H_
