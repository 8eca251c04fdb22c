#ifndef SHARDD_SERVER_LOOP_CORE_LOOP_H_
#define SHARDD_SERVER_LOOP_CORE_LOOP_H_

// The one thread that owns all job state. Everything called "loop-confined" runs here, so the state machines need no
// locks. Reactions are short: memory is allocated on the setup thread, bytes move on device threads.

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/clock/monotonic_now.h"
#include "common/shm/unique_fd.h"
#include "server/observe/duration_histogram.h"

namespace shardd {

class CoreLoop {
 public:
  using Closure = absl::AnyInvocable<void()>;
  // What waits for the loop waits on busy cores too; queues with work that takes long are to leave those to others.
  enum class Urgency { kLoop, kQueue };
  // `before_sleep`: runs on the loop each time before it may sleep; returns true when it found work, then the loop goes
  // round once more without sleeping. `name`: the thread's, 15 characters at most.
  explicit CoreLoop(std::function<bool()> before_sleep = nullptr, std::string name = "core",
                    Urgency urgency = Urgency::kLoop);
  // A thread for work that blocks: no more than a queue.
  static std::unique_ptr<CoreLoop> MakeQueue(std::string name) {
    return std::make_unique<CoreLoop>(nullptr, std::move(name), Urgency::kQueue);
  }
  ~CoreLoop();  // Stop()
  CoreLoop(const CoreLoop&) = delete;
  CoreLoop& operator=(const CoreLoop&) = delete;

  // Thread-safe. Runs `closure` on the loop, in order. After Stop it is dropped.
  void Post(Closure closure) ABSL_LOCKS_EXCLUDED(mutex_);
  // Thread-safe, not on the loop: runs `closure` there and waits for it. Returns without running it after Stop. False:
  // `limit` has passed, and `closure` runs later.
  bool RunAndWait(Closure closure, absl::Duration limit = absl::InfiniteDuration());
  // Finishes what is posted, then joins. Idempotent. Not on the loop. False: a closure has not ended within `limit`,
  // and the thread is left to it; the object must then never be destroyed.
  bool Stop(absl::Duration limit = absl::InfiniteDuration()) ABSL_LOCKS_EXCLUDED(mutex_);
  // Thread-safe. How many closures were posted, and how many of those have run, since the loop was made.
  uint64_t posted() const { return posted_count_.load(std::memory_order_acquire); }
  uint64_t ran() const { return ran_count_.load(std::memory_order_acquire); }
  bool InLoop() const { return std::this_thread::get_id() == thread_.get_id(); }

  // Loop-confined from here on. `on_readable` runs whenever fd is readable, until RemoveFd. The fd is borrowed. `edge`:
  // once for each time something arrives; the descriptor need not be read, which for one that a client shares could
  // block.
  void AddFd(int fd, std::function<void()> on_readable, bool edge = false);
  void RemoveFd(int fd);
  // Runs once, at or after `when` (of MonotonicNow). Ids are never reused; cancelling a timer that has run is a no-op.
  uint64_t AddTimer(absl::Time when, Closure closure);
  void CancelTimer(uint64_t id);
  // How much later than asked for each timer ran.
  const DurationHistogram& lag() const { return lag_; }

 private:
  void Run();
  bool RunPosted() ABSL_LOCKS_EXCLUDED(mutex_);
  int RunTimers();  // returns milliseconds until the next, -1: none
  void Wake();

  // Constant after construction.
  const std::function<bool()> before_sleep_;
  const std::string name_;
  const Urgency urgency_;
  UniqueFd epoll_;
  UniqueFd wake_;
  // Guarded.
  absl::Mutex mutex_;
  std::vector<Closure> posted_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::atomic<uint64_t> posted_count_ = 0;
  std::atomic<uint64_t> ran_count_ = 0;
  // Loop-confined.
  struct Watch {
    uint64_t generation = 0;
    std::function<void()> on_readable;
  };
  absl::flat_hash_map<int, std::shared_ptr<Watch>> watches_;
  std::map<std::pair<absl::Time, uint64_t>, Closure> timers_;
  absl::flat_hash_map<uint64_t, absl::Time> timer_times_;
  uint64_t next_timer_ = 1;
  DurationHistogram lag_;
  uint64_t next_generation_ = 1;
  // Last: starts when all else is there.
  std::thread thread_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_LOOP_CORE_LOOP_H_
