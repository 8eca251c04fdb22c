#ifndef SHARDD_SERVER_JOB_WORK_JOB_WORK_H_
#define SHARDD_SERVER_JOB_WORK_JOB_WORK_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "server/job/job_part.h"

namespace shardd {

class CoreLoop;

// One job's device work in flight: keeps the job, and so its slabs, alive until the last piece has ended, and comes
// back to the loop. Owns the count of what writes gradient shards. Loop-confined; devices call what Join returns.
class JobWork final : public JobPart {
 public:
  using Done = std::function<void(absl::Status)>;
  // Both outlive this.
  JobWork(CoreLoop* loop, JobControl* job) : loop_(loop), job_(job) {}

  // Runs `on_loop` on the loop, and then the job advances, when `count` calls of the returned function were made, with
  // their first error.
  Done Join(int count, Done on_loop);
  // The same for work that writes gradient shards.
  Done JoinGradientWork(int count, Done on_loop);
  CoreLoop* loop() const { return loop_; }
  // Keeps the job alive.
  std::shared_ptr<void> Keep() const { return job_->Keep(); }
  // Runs `then`, and then the job advances. For what comes back to the loop by itself.
  Done AndAdvance(Done then) const {
    return [this, then = std::move(then)](absl::Status status) {
      then(std::move(status));
      job_->Advance();
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
  JobControl* const job_;
  int gradient_work_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_WORK_JOB_WORK_H_
