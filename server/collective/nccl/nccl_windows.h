#ifndef SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_WINDOWS_H_
#define SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_WINDOWS_H_

#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/collective/nccl/nccl_communicator.h"

namespace shardd {

class DeviceSlab;

// Registers the gradient slots of one job's ranks as the window of its communicator: once every rank has slots, and
// again whenever a rank gets others or the communicator changes. Registering and deregistering block, on short-lived
// threads; sums wait meanwhile, in order, so that the choice of reducer does not depend on when a rank attached. A call
// that does not return within kLimits times the communicator's limit keeps its thread; the communicator is given up,
// and sums go on. Thread-safe.
class NcclWindows : public std::enable_shared_from_this<NcclWindows> {
 public:
  using Slabs = NcclCommunicator::Slabs;
  // One limit for NCCL's call, one for making another communicator.
  static constexpr int kLimits = 2;
  // Makes a replacement for a communicator that has refused its window and is broken since; null: there is none.
  using Replace = std::function<std::shared_ptr<NcclCommunicator>()>;
  NcclWindows(std::shared_ptr<NcclCommunicator> communicator, Replace replace);

  // Sets the rank's slots; null: none. Keeps what the window names until it is deregistered.
  void SetSlots(int rank, std::shared_ptr<const DeviceSlab> slots) ABSL_LOCKS_EXCLUDED(mutex_);
  // Switches to another communicator; the old window ended with the old communicator.
  void Use(std::shared_ptr<NcclCommunicator> communicator) ABSL_LOCKS_EXCLUDED(mutex_);
  // Runs `issue`, at once or on another thread when the window is as wanted; or `cancel`, in Stop. The window does not
  // change between `issue` and Leave, which must be called once for it.
  void Enter(std::function<void()> issue, std::function<void()> cancel) ABSL_LOCKS_EXCLUDED(mutex_);
  void Leave() ABSL_LOCKS_EXCLUDED(mutex_);
  // Deregisters the window once every sum has left. No `issue` is running or will run when this returns.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);
  // "symmetric window of 4096 bytes on each GPU, registered 1 time(s)", or why there is none.
  std::string Describe() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Valid between `issue` and Leave: NCCL makes the sums in the window if it can.
  bool registered() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Sum {
    std::function<void()> issue, cancel;
  };
  // Result of a change.
  struct Outcome {
    absl::Status status;
    bool refuses = false;                       // no more windows
    std::shared_ptr<NcclCommunicator> instead;  // replaces the communicator that was asked
  };
  Slabs WantedLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void MaybeStartLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Runs until the window is as wanted and nobody waits, or until users have to leave first.
  void Work() ABSL_LOCKS_EXCLUDED(mutex_);
  // Registers `to`; empty: deregisters the current window.
  void Change(const std::shared_ptr<NcclCommunicator>& communicator, const Slabs& to) ABSL_LOCKS_EXCLUDED(mutex_);
  static Outcome Ask(NcclCommunicator& communicator, const Slabs& to, const Replace& replace);

  const Replace replace_;

  // Guarded.
  mutable absl::Mutex mutex_;
  std::shared_ptr<NcclCommunicator> communicator_ ABSL_GUARDED_BY(mutex_);
  Slabs slots_ ABSL_GUARDED_BY(mutex_);       // by rank, as wanted
  Slabs registered_ ABSL_GUARDED_BY(mutex_);  // with communicator_; empty: none
  bool is_working_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_issuing_ ABSL_GUARDED_BY(mutex_) = false;  // Work is inside an `issue`
  bool is_stopped_ ABSL_GUARDED_BY(mutex_) = false;
  int inside_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<Sum> waiting_ ABSL_GUARDED_BY(mutex_);
  int registrations_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string refused_ ABSL_GUARDED_BY(mutex_);  // why none is registered any more
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_WINDOWS_H_
