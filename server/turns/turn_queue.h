#ifndef SHARDD_SERVER_TURNS_TURN_QUEUE_H_
#define SHARDD_SERVER_TURNS_TURN_QUEUE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/turns/turns.h"

namespace shardd {

// A thread for work of many jobs that takes long. Each job's work runs in the order in which it was posted, a piece at
// a time; whose piece is next, Turns says, by the time that pieces took.
//
// Owns the thread and what is posted. Thread-safe.
class TurnQueue {
 public:
  // Does a piece of a few milliseconds; returns true if there is nothing more to do. It is called again until then.
  using Work = absl::AnyInvocable<bool()>;

  // `name`: the thread's, 15 characters at most.
  explicit TurnQueue(std::string name);
  ~TurnQueue();  // Stop()
  TurnQueue(const TurnQueue&) = delete;
  TurnQueue& operator=(const TurnQueue&) = delete;

  // Never blocks. After Stop `work` is dropped.
  void Post(WorkOwner owner, Work work) ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits until everything is done that was posted, by anybody. Not on the thread.
  void Drain() ABSL_LOCKS_EXCLUDED(mutex_);
  // Finishes what is posted, then joins. Idempotent. Not on the thread. False: a piece has not ended within `limit`,
  // and the thread is left to it; the object must then never be destroyed.
  bool Stop(absl::Duration limit = absl::InfiniteDuration()) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  static constexpr int64_t kMostSavedNs = 4'000'000;

  void Run();

  // Constant after construction.
  const std::string name_;
  // Guarded.
  absl::Mutex mutex_;
  Turns turns_ ABSL_GUARDED_BY(mutex_){kMostSavedNs};
  std::map<WorkOwner, std::deque<Work>> posted_ ABSL_GUARDED_BY(mutex_);  // of owners with work; the first may run
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  // Last: starts when all else is there.
  std::thread thread_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_TURNS_TURN_QUEUE_H_
