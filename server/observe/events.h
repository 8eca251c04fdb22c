#ifndef SHARDD_SERVER_OBSERVE_EVENTS_H_
#define SHARDD_SERVER_OBSERVE_EVENTS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "server/tenant/tenant.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

// Keeps events and steps for longer than the daemon lives. Thread-safe; never waits for a disk.
class EventKeeper {
 public:
  virtual ~EventKeeper() = default;
  virtual void KeepEvent(const v1::Event& event, const Tenant& owner) = 0;
  virtual void KeepStep(absl::string_view job, const Tenant& owner, const v1::HistoryStep& step) = 0;
};

// The newest events of all jobs, for operators to read after a failure. Bounded: drops the oldest. Sequence numbers
// start at 1 and never repeat, so a gap shows a reader that events were dropped.
//
// Thread-safe. Never blocks except on its own mutex.
class EventLog {
 public:
  static constexpr size_t kCapacity = 4096;
  // Cuts longer texts, so that a hostile name cannot make the log large.
  static constexpr size_t kMaxTextBytes = 1024;

  explicit EventLog(size_t capacity = kCapacity) : capacity_(capacity == 0 ? 1 : capacity) {}
  EventLog(const EventLog&) = delete;
  EventLog& operator=(const EventLog&) = delete;

  // `owner` is the job's and decides who may read the event, which does not contain it. `rank` -1: the job.
  void Add(absl::string_view job, const Tenant& owner, uint64_t epoch, int64_t step, int rank, absl::string_view kind,
           std::string text) ABSL_LOCKS_EXCLUDED(mutex_);

  // Everything from here on is kept there, too, and steps there alone. Outlives this; null: nowhere. Before the first
  // event.
  void KeepBy(EventKeeper* keeper) { keeper_ = keeper; }
  void AddStep(absl::string_view job, const Tenant& owner, const v1::HistoryStep& step) {
    if (keeper_ != nullptr) keeper_->KeepStep(job, owner, step);
  }

  // The newest `limit` events (<= 0: 100) of `job` (empty: every job) whose owner `may_see` accepts, oldest first.
  // `may_see` runs under the mutex and must not call back into the log.
  std::vector<v1::Event> List(absl::string_view job, int limit,
                              absl::FunctionRef<bool(const Tenant& owner)> may_see) const ABSL_LOCKS_EXCLUDED(mutex_);
  std::vector<v1::Event> List(absl::string_view job = "", int limit = 0) const {
    return List(job, limit, [](const Tenant&) { return true; });
  }

  // Number of the newest event; 0 before the first.
  uint64_t last_sequence() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Entry {
    Tenant owner;
    v1::Event event;
  };

  const size_t capacity_;
  EventKeeper* keeper_ = nullptr;

  mutable absl::Mutex mutex_;
  std::deque<Entry> ring_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_sequence_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_OBSERVE_EVENTS_H_
