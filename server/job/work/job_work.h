#ifndef SHARDD_SERVER_JOB_WORK_JOB_WORK_H_
#define SHARDD_SERVER_JOB_WORK_JOB_WORK_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "server/job/job_part.h"
#include "server/loop/core_loop.h"

namespace shardd {

// One job's device work in flight: keeps the job, and so its slabs, alive until the last piece has ended, and comes
// back to the loop. Owns the count of what writes gradient shards. Loop-confined; devices call what Join returns.
class JobWork final : public JobPart {
 public:
  using Done = std::function<void(absl::Status)>;
  // `keep` returns a reference that keeps the job alive; `advance` does what the end of a piece allows. Both are called
  // on the loop, `keep` only while the job lives.
  JobWork(CoreLoop* loop, std::function<std::shared_ptr<void>()> keep, std::function<void()> advance)
      : loop_(loop), keep_(std::move(keep)), advance_(std::move(advance)) {}

  // Runs `on_loop` on the loop, and then `advance`, when `count` calls of the returned function were made, with their
  // first error.
  Done Join(int count, Done on_loop);
  // The same for work that writes gradient shards.
  Done JoinGradientWork(int count, Done on_loop);
  // Keeps the job alive.
  std::shared_ptr<void> Keep() const { return keep_(); }
  // Runs `then`, and then `advance`. For what comes back to the loop by itself.
  Done AndAdvance(Done then) const {
    return [this, then = std::move(then)](absl::Status status) {
      then(std::move(status));
      advance_();
    };
  }
  // Work that writes gradient shards and has not ended, of whatever epoch.
  int gradient_work() const { return gradient_work_; }
  // It would write into what a new session is about to give.
  absl::Status CheckMayBegin(const std::string& what) override;
  // Such work that is no device's.
  void BeginGradientWork() { ++gradient_work_; }
  void EndGradientWork() { --gradient_work_; }

 private:
  CoreLoop* const loop_;
  const std::function<std::shared_ptr<void>()> keep_;
  const std::function<void()> advance_;
  int gradient_work_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_WORK_JOB_WORK_H_
