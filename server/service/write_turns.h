#ifndef SHARDD_SERVER_SERVICE_WRITE_TURNS_H_
#define SHARDD_SERVER_SERVICE_WRITE_TURNS_H_

#include <functional>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "grpcpp/alarm.h"

namespace shardd {

// What a stream that the daemon writes may do next: gRPC allows one write at a time, and after Finish nothing may
// begin. Guarded by its stream's mutex.
class WriteTurns {
 public:
  enum class Next { kNothing, kWrite, kFinish };
  // What begins now, where `queued` says whether there is something to write. kWrite: StartWrite, and Written() when it
  // is done. kFinish: Finish(why()). Each is returned once.
  Next Take(bool queued) {
    if (writing_ || finished_) return Next::kNothing;
    if (queued) {
      writing_ = true;
      return Next::kWrite;
    }
    finished_ = end_.has_value();
    return finished_ ? Next::kFinish : Next::kNothing;
  }
  void Written() { writing_ = false; }
  // The stream ends when all that is queued is written. False: it ends already, with another status.
  bool End(absl::Status why) {
    if (end_.has_value()) return false;
    end_ = std::move(why);
    return true;
  }
  // It ends at once: what is queued cannot be written. Finish is for the caller.
  void EndNow() {
    writing_ = false;
    finished_ = true;
  }
  // Runs `cancel` unless the stream's alarm goes before: limits the time that a reader takes for what is queued.
  void LimitEnd(absl::Duration patience, std::function<void()> cancel);

  bool ends() const { return end_.has_value(); }
  bool finished() const { return finished_; }
  const absl::Status& why() const { return *end_; }  // REQUIRES: ends()

 private:
  bool writing_ = false;
  bool finished_ = false;
  absl::optional<absl::Status> end_;
  grpc::Alarm patience_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_SERVICE_WRITE_TURNS_H_
