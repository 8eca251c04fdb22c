#ifndef SHARDD_SERVER_DAEMON_TAKE_UP_TAKE_UPS_H_
#define SHARDD_SERVER_DAEMON_TAKE_UP_TAKE_UPS_H_

// Jobs of the daemon before that are taken up beside each other. One whose update that daemon has left may take
// minutes; this daemon then serves all others, and who names it comes again.

#include <cstddef>
#include <cstdint>
#include <deque>
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
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/clock/timed_condition.h"
#include "server/loop/core_loop.h"
#include "server/tenant/tenant.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

// Thread-safe.
class TakeUps {
 public:
  using Name = std::pair<uint32_t, std::string>;  // of the owner's uid
  enum class Next {
    kDone,   // it is taken up, or never will be
    kTakes,  // it is described (Describe), and what is left takes long
  };
  // A job. `advance` is called again until it says kDone, and blocks as long as it takes, off the loop. An error says
  // what is short at the moment: it is called again a second later.
  struct TakeUp {
    uint64_t job_id = 0;
    absl::AnyInvocable<absl::StatusOr<Next>()> advance;
  };

  // What a job has when it is taken up. Until then new jobs, of whomever, leave it alone.
  struct Claim {
    int64_t quota_bytes = 0;    // as its uid's quota counts them
    int64_t planned_bytes = 0;  // of the host. Some are there, but may be given back for a while, to be made anew
  };

  TakeUps() = default;
  ~TakeUps() { Stop(absl::InfiniteDuration()); }
  TakeUps(const TakeUps&) = delete;
  TakeUps& operator=(const TakeUps&) = delete;

  // Takes up all jobs of each name in their order, and those of up to 64 names at the same time; what takes long begins
  // when all are described. Returns when all are taken up, or after `limit`. Once.
  void Begin(std::map<Name, std::vector<TakeUp>> jobs, absl::Duration limit);
  // Says of the job that is being taken up what ListJobs is to say meanwhile. Its ranks ask for it there.
  void Describe(Tenant owner, v1::Job job, Claim claim);
  void List(absl::FunctionRef<void(const Tenant& owner, const v1::Job& job, const Claim& claim)> say) const;
  // ABORTED: of a job of that uid nobody has called Describe yet. Without one: of anybody's.
  absl::Status CheckDescribed(absl::string_view what, std::optional<uint32_t> uid) const;
  // ABORTED: a job of that name is being taken up. Without a uid: of anybody's.
  absl::Status Check(absl::string_view what, std::optional<uint32_t> uid, absl::string_view name) const;
  // The same of the job with that number.
  absl::Status CheckId(absl::string_view what, uint64_t job_id) const;
  // ABORTED: what a job claims is not known yet. Of one that lacks something it may not be known for long, and it holds
  // no others up.
  absl::Status CheckClaims(absl::string_view what) const;
  // Names of jobs that are being taken up.
  size_t count() const;
  // What operators are to know; empty: nothing is being taken up.
  std::string Warning() const;
  // Begins with no other job. False: one is being taken up after `limit` still, and its thread is left to it: this must
  // then never be destroyed.
  bool Stop(absl::Duration limit);

 private:
  struct Queued {
    Name name;
    std::deque<TakeUp> jobs;
    absl::Time from = absl::InfinitePast();
  };
  struct Left {
    std::vector<uint64_t> ids;
    struct Described {
      Tenant owner;
      v1::Job job;
      Claim claim;
    };
    std::optional<Described> described;
    std::string lacks;  // why it is not taken up yet, beside that it takes long
  };
  void Work();
  // Waits for it. Nothing: there is nothing left to begin with.
  std::optional<Queued> TakeNext() ABSL_LOCKS_EXCLUDED(mutex_);

  mutable absl::Mutex mutex_;
  TimedCondition changed_;                              // left_ has fewer, or stopped_
  std::deque<Queued> unknown_ ABSL_GUARDED_BY(mutex_);  // what they are
  std::deque<Queued> queued_ ABSL_GUARDED_BY(mutex_);   // the others that wait for a thread
  std::map<Name, Left> left_ ABSL_GUARDED_BY(mutex_);   // of those that wait for one or have one
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::unique_ptr<CoreLoop>> threads_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_DAEMON_TAKE_UP_TAKE_UPS_H_
