#ifndef SHARDD_TESTS_SERVER_JOB_HELD_COPIER_H_
#define SHARDD_TESTS_SERVER_JOB_HELD_COPIER_H_

#include <unistd.h>

#include "absl/synchronization/notification.h"
#include "server/turns/turn_queue.h"
#include "tests/server/job/job_loop_fixture.h"

namespace shardd {

// A copier that does nothing for a while, as one whose GPU hangs; at the latest until this ends. Before the copier
// does.
class HeldCopier {
 public:
  explicit HeldCopier(TurnQueue* copier) : copier_(copier) {}
  ~HeldCopier() {
    LetGo();
    copier_->Drain();
  }
  // From here on.
  void Hold() {
    copier_->Post({getuid(), 1}, [this] {
      go_.WaitForNotificationWithTimeout(kPatience);
      return true;
    });
  }
  // For good.
  void LetGo() {
    if (!go_.HasBeenNotified()) go_.Notify();
  }

 private:
  TurnQueue* const copier_;
  absl::Notification go_;
};

}  // namespace shardd

#endif  // SHARDD_TESTS_SERVER_JOB_HELD_COPIER_H_
