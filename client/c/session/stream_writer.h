#ifndef SHARDD_CLIENT_C_SESSION_STREAM_WRITER_H_
#define SHARDD_CLIENT_C_SESSION_STREAM_WRITER_H_

#include <pthread.h>

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/clock/deadline.h"
#include "common/clock/timed_condition.h"
#include "shardd/v1/trainer.pb.h"

namespace shardd {

// Writes a session's commands to its stream from a thread of its own: a write of gRPC blocks as long as the daemon does
// not read, and the caller's waits must end by interrupts and timeouts. What is pushed while a write is under way goes
// out as one message. It holds no one back: commands are as many as the ring would have, because whoever pushes waits
// for their execution (CommandRing). Thread-safe.
class StreamWriter {
 public:
  // Writes a request, or returns false: the stream is broken, for a reason that its reader learns.
  using Stream = std::function<bool(const v1::SessionRequest& request)>;
  // Nobody else writes to the stream. RESOURCE_EXHAUSTED: there is no thread.
  static absl::StatusOr<std::unique_ptr<StreamWriter>> Start(Stream stream);
  // REQUIRES: End has returned true.
  ~StreamWriter() = default;
  StreamWriter(const StreamWriter&) = delete;
  StreamWriter& operator=(const StreamWriter&) = delete;

  // How long what is not urgent waits for what is. Then the daemon hears of it all the same: that a rank has begun a
  // forward, for one, so that it is not idle.
  static constexpr absl::Duration kLinger = absl::Milliseconds(5);

  // Puts a command behind what was pushed before. If it is not `urgent` it waits for kLinger, an urgent one or Flush.
  void Push(v1::Command command, bool urgent) ABSL_LOCKS_EXCLUDED(mutex_);
  // Another request, behind the commands. Urgent.
  void Push(v1::SessionRequest request) ABSL_LOCKS_EXCLUDED(mutex_);
  void Flush() ABSL_LOCKS_EXCLUDED(mutex_);
  // Writes nothing more, and waits for the thread until `deadline`. Returns whether it has ended. REQUIRES: the stream
  // was cancelled, which ends a write under way.
  bool End(Deadline deadline) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Message {
    v1::SessionRequest request;
    size_t size_bytes = 0;
  };
  explicit StreamWriter(Stream stream) : stream_(std::move(stream)) {}
  static void* ThreadMain(void* self);
  void Write() ABSL_LOCKS_EXCLUDED(mutex_);

  // Constant after Start.
  const Stream stream_;
  pthread_t thread_ = 0;
  // Guarded.
  absl::Mutex mutex_;
  TimedCondition changed_;  // urgent_, ending_, ended_
  std::deque<Message> messages_ ABSL_GUARDED_BY(mutex_);
  bool urgent_ ABSL_GUARDED_BY(mutex_) = false;  // all that is there is to be written
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool joined_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_SESSION_STREAM_WRITER_H_
