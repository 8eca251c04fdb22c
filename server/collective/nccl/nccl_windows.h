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

// The gradient slots of one job's ranks as the window of its communicator: registered once every rank has slots, and
// anew whenever one has others or the communicator is another. Both block, on threads that come and go; sums wait
// meanwhile, in order, so that who adds does not depend on when a rank was there. What has not come back after
// kLimits times the communicator's limit keeps its thread: the communicator is given up, and sums go on. Thread-safe.
class NcclWindows : public std::enable_shared_from_this<NcclWindows> {
 public:
  using Slabs = NcclCommunicator::Slabs;
  // One for what NCCL is asked of, one for another communicator that is made instead.
  static constexpr int kLimits = 2;
  // Instead of a communicator that has refused its window and is broken since; null: there is none.
  using Replace = std::function<std::shared_ptr<NcclCommunicator>()>;
  NcclWindows(std::shared_ptr<NcclCommunicator> communicator, Replace replace);

  // Where the rank's slots lie from now on; null: it has none. What the window names is kept until it is deregistered.
  void SetSlots(int rank, std::shared_ptr<const DeviceSlab> slots) ABSL_LOCKS_EXCLUDED(mutex_);
  // Sums are made by another from now on; the window before has ended with its communicator.
  void Use(std::shared_ptr<NcclCommunicator> communicator) ABSL_LOCKS_EXCLUDED(mutex_);
  // Runs `issue`, at once or on another thread when the window is as it is to be, or `cancel`, in Stop. Between `issue`
  // and Leave, which is called once for it, the window stays as it is.
  void Enter(std::function<void()> issue, std::function<void()> cancel) ABSL_LOCKS_EXCLUDED(mutex_);
  void Leave() ABSL_LOCKS_EXCLUDED(mutex_);
  // The window is deregistered, once every sum has left. No `issue` is running or will run when this returns.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);
  // "symmetric window of 4096 bytes on each GPU, registered 1 time(s)", or why there is none.
  std::string Describe() const ABSL_LOCKS_EXCLUDED(mutex_);
  // For whoever is between `issue` and Leave: sums that NCCL can do so are in the window.
  bool registered() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Sum {
    std::function<void()> issue, cancel;
  };
  // What became of a change.
  struct Outcome {
    absl::Status status;
    bool refuses = false;                       // no window from now on
    std::shared_ptr<NcclCommunicator> instead;  // of the one that was asked
  };
  Slabs WantedLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void MaybeStartLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Until the window is what is wanted and nobody waits, or who is inside has to leave first.
  void Work() ABSL_LOCKS_EXCLUDED(mutex_);
  // `to` is registered; empty: what is there is deregistered.
  void Change(const std::shared_ptr<NcclCommunicator>& communicator, const Slabs& to) ABSL_LOCKS_EXCLUDED(mutex_);
  static Outcome Ask(NcclCommunicator& communicator, const Slabs& to, const Replace& replace);

  const Replace replace_;

  // Guarded.
  mutable absl::Mutex mutex_;
  std::shared_ptr<NcclCommunicator> communicator_ ABSL_GUARDED_BY(mutex_);
  Slabs slots_ ABSL_GUARDED_BY(mutex_);       // by rank, as they are to be
  Slabs registered_ ABSL_GUARDED_BY(mutex_);  // with communicator_; empty: nothing
  bool is_working_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_issuing_ ABSL_GUARDED_BY(mutex_) = false;  // Work is in an `issue`
  bool is_stopped_ ABSL_GUARDED_BY(mutex_) = false;
  int inside_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<Sum> waiting_ ABSL_GUARDED_BY(mutex_);
  int registrations_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string refused_ ABSL_GUARDED_BY(mutex_);  // why none is registered any more
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NCCL_NCCL_WINDOWS_H_
