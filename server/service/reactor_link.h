#ifndef SHARDD_SERVER_SERVICE_REACTOR_LINK_H_
#define SHARDD_SERVER_SERVICE_REACTOR_LINK_H_

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace shardd {

// Leads to a reactor of gRPC, which deletes itself, for those that may outlive it. Thread-safe.
template <typename Reactor>
class ReactorLink {
 public:
  explicit ReactorLink(Reactor* reactor) : reactor_(reactor) {}
  // Calls `use` with the reactor, which lives until that returns. False: it is gone.
  template <typename Use>
  bool With(Use use) const {
    absl::MutexLock lock(&mutex_);
    if (reactor_ == nullptr) return false;
    use(*reactor_);
    return true;
  }
  // In OnDone.
  void Detach() {
    absl::MutexLock lock(&mutex_);
    reactor_ = nullptr;
  }

 private:
  mutable absl::Mutex mutex_;
  Reactor* reactor_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace shardd

#endif  // SHARDD_SERVER_SERVICE_REACTOR_LINK_H_
