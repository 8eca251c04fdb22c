#ifndef SHARDD_SERVER_SERVICE_TRACE_REACTOR_H_
#define SHARDD_SERVER_SERVICE_TRACE_REACTOR_H_

#include <deque>
#include <memory>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "grpcpp/grpcpp.h"
#include "server/service/fd_reply.h"
#include "server/service/write_turns.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

class TraceSink;

// The stream of one TraceJob call. Its sink may outlive it and then leads nowhere. What the reader has not taken waits
// here, up to kMaxQueuedBytes. Thread-safe; deletes itself.
class TraceReactor final : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  static constexpr size_t kMaxQueuedBytes = size_t{4} << 20;

  explicit TraceReactor(grpc::CallbackServerContext* context);
  // Takes the call's share of its caller's limit until the call is over and read.
  void Hold(PendingSlot slot) { slot_.emplace(std::move(slot)); }
  // Ends the call with CANCELLED if it is released without Finish. REQUIRES: called once.
  std::shared_ptr<TraceSink> sink() const;

  void OnWriteDone(bool ok) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnCancel() override;
  void OnDone() override;

 private:
  class Sink;
  absl::Status Prepare(const v1::TraceJobResponse& start) ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns false if there is no room, or the call is over. An error: it cannot be encoded.
  absl::StatusOr<bool> Enqueue(const v1::TraceJobResponse& message) ABSL_LOCKS_EXCLUDED(mutex_);
  void FinishWhenWritten(absl::Status status) ABSL_LOCKS_EXCLUDED(mutex_);
  void AdvanceLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Constant after construction.
  grpc::CallbackServerContext* const context_;
  const std::shared_ptr<Sink> sink_;
  std::optional<PendingSlot> slot_;
  // Guarded. Lock order: Sink's mutex before mutex_.
  absl::Mutex mutex_;
  grpc::ByteBuffer prepared_ ABSL_GUARDED_BY(mutex_);           // sent before the start
  std::deque<grpc::ByteBuffer> queue_ ABSL_GUARDED_BY(mutex_);  // the front is being written
  std::deque<size_t> sizes_bytes_ ABSL_GUARDED_BY(mutex_);      // of queue_, whose front gRPC may have taken apart
  size_t queued_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  WriteTurns turns_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace shardd

#endif  // SHARDD_SERVER_SERVICE_TRACE_REACTOR_H_
