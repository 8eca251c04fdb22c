#ifndef SHARDD_SERVER_JOB_MEMBERSHIP_GRADIENT_WRITERS_H_
#define SHARDD_SERVER_JOB_MEMBERSHIP_GRADIENT_WRITERS_H_

// Processes of epochs that have ended and may still write a job's gradient shards.
//
// Every trainer maps its job's gradient shards for writing, to clip and unscale them, and one that was stopped does so
// when it goes on, however many epochs later. So each session's process counts as a writer of the slab that it was
// given until it is known to have ended, or asks to attach again, which its library does when no store of its process
// reaches the job's memory any more. A rank whose last process is still one is not attached to the same slab: the
// process is killed where that was asked for and is allowed, and else there is a new slab, and whoever has a session
// begins anew with it. Of the old one the host's pages are given back: what is stored there takes memory of who stores.
// On GPUs it is what it was until all have ended that may write it, so there is one such slab at a time, and whoever
// would make another is refused, with the names of the processes that have to end.
//
// The same serves for sums that a GPU may still make (trainer_sums.h) of a process whose end nothing tells.

#include <cstdint>
#include <list>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/shm/unique_fd.h"
#include "server/job/membership/attach_answer.h"

namespace shardd {

class JobMemory;
class JobSlab;
struct PastProcess;
class Session;

// Owns what is known of processes that may write gradient shards, and the slab that was left to them. GradientRenewal
// makes new ones. Loop-confined.
class GradientWriters {
 public:
  // `memory` outlives this.
  explicit GradientWriters(const JobMemory* memory);
  ~GradientWriters();

  // Nobody knows who may write them: they are the daemon's before.
  void TakeUp() { anybody_ = true; }
  // This one may.
  void TakeUp(const PastProcess& former);
  // The epoch of the session ends, and its process may live on.
  void EpochEnded(const Session& session);
  // The left slab where no process that may write it lives any more, else null. What devices do with it may not have
  // ended.
  std::unique_ptr<JobSlab> TakeUnused();
  // `what` begins every text. `process`: the pidfd of who asks, where there is one.
  AttachAnswer MayAttach(const std::string& what, int rank, int32_t pid, const UniqueFd& process, bool replace);

  // One renewal, in this order. RESOURCE_EXHAUSTED: a slab is left to others already.
  absl::Status CheckNoneLeft(const std::string& what, const std::string& why) const;
  // Why the last one failed, once; then it may be tried again.
  absl::Status TakeFailure(const std::string& what, const std::string& why);
  // Returns who the slab is left to, in words.
  std::string Begin();
  // There is a new slab: `old` is left to all that may write it.
  void Leave(std::unique_ptr<JobSlab> old);
  void Fail(absl::Status why);
  void Stop() { under_way_ = false; }  // the job is closed

  bool under_way() const { return under_way_; }
  const JobSlab* left() const { return left_.get(); }

 private:
  struct Writer {
    int rank = 0;
    int32_t pid = 0;
    uint32_t uid = 0;  // of its session
    UniqueFd process;
    absl::Time killed = absl::InfiniteFuture();
  };
  static std::string TextOf(const std::list<Writer>& writers);
  void ForgetEnded();

  const JobMemory& memory_;
  std::list<Writer> writers_;  // of the gradient shards, in epochs that have ended
  std::list<Writer> left_to_;  // of those before; empty: there are none
  std::unique_ptr<JobSlab> left_;
  bool anybody_ = false;  // may write the gradient shards
  bool under_way_ = false;
  absl::Status failed_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_MEMBERSHIP_GRADIENT_WRITERS_H_
