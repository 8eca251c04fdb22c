#ifndef SHARDD_SERVER_PEER_PEER_STREAM_H_
#define SHARDD_SERVER_PEER_PEER_STREAM_H_

// One gRPC stream between two daemons, for the caller and the called side alike: bytes in, bytes out, an end. gRPC
// allows one read and one write at a time, nothing new after the end, and requires the object to live until OnDone;
// this class ensures all of that.

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "grpcpp/grpcpp.h"

namespace shardd {

// Thread-safe. Keeps itself alive until gRPC is done with it.
class PeerStream : public std::enable_shared_from_this<PeerStream> {
 public:
  using ReadDone = std::function<void(absl::StatusOr<grpc::ByteBuffer>)>;
  using Sent = std::function<void(absl::Status)>;

  virtual ~PeerStream() = default;
  PeerStream(const PeerStream&) = delete;
  PeerStream& operator=(const PeerStream&) = delete;

  // Reads the next message, or the end of the stream: for the caller the other side's status, UNAVAILABLE if the
  // connection is lost. One read at a time. `done` runs on a thread of gRPC, never within the call, and not at all
  // after Finish or Abort of this side.
  void Read(ReadDone done) ABSL_LOCKS_EXCLUDED(mutex_);
  // Writes in order. Returns false and writes nothing if more than `max_queued_bytes` would then be queued.
  bool Write(grpc::ByteBuffer bytes, int64_t max_queued_bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  // Writes `header` followed by `elements`, which are copied only when it is their turn: gRPC may keep its buffers as
  // long as the kernel does, which for a stopped daemon is until a keepalive fails. `sent` runs once, on a thread of
  // gRPC or of Abort, never within the call. Returns false if nothing can be written any more; then `sent` stays with
  // the caller.
  bool WritePiece(std::string header, absl::string_view elements, Sent& sent) ABSL_LOCKS_EXCLUDED(mutex_);
  // True if no write is queued.
  bool idle() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends the stream when the queue is written; drops what still arrives.
  void Finish(absl::Status status) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends the stream now and drops the queue. Each `sent` has run when this returns, or is running on another thread.
  void Abort(absl::Status status) ABSL_LOCKS_EXCLUDED(mutex_);
  // True if gRPC is done with the stream.
  bool gone() const ABSL_LOCKS_EXCLUDED(mutex_);

 protected:
  PeerStream() = default;
  virtual bool caller() const = 0;
  // Implemented by the reactor. The first four begin an operation, never call back, and are called with the mutex held.
  virtual void BeginRead(grpc::ByteBuffer* into) = 0;
  virtual void BeginWrite(const grpc::ByteBuffer* bytes) = 0;
  virtual void BeginFinish(const absl::Status& status) = 0;
  virtual void Cancel() = 0;
  // Caller only: no operation follows.
  virtual void Release() = 0;
  // The stream is gone: lets go of its channel. With the mutex held.
  virtual void Forget() = 0;

  // Called by gRPC.
  void HandleRead(bool ok) ABSL_LOCKS_EXCLUDED(mutex_);
  void HandleWritten(bool ok) ABSL_LOCKS_EXCLUDED(mutex_);
  // The last call: releases this object.
  void HandleDone(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  // Keeps this object alive until HandleDone.
  void HoldSelf() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Outgoing {
    grpc::ByteBuffer bytes;  // either this, or header and elements
    std::string header;
    absl::string_view elements;
    Sent sent;
    int64_t size_bytes = 0;
  };
  void AdvanceLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DrainLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Removes the whole queue; the caller runs the returned `sent` without the mutex.
  std::vector<Sent> DropLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void RunAll(std::vector<Sent> all);

  mutable absl::Mutex mutex_;
  std::shared_ptr<PeerStream> self_ ABSL_GUARDED_BY(mutex_);
  std::deque<Outgoing> queue_ ABSL_GUARDED_BY(mutex_);
  int64_t queued_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // of the queue and of the current write
  int64_t writing_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  grpc::ByteBuffer written_ ABSL_GUARDED_BY(mutex_);  // current write
  Sent written_sent_ ABSL_GUARDED_BY(mutex_);         // of the current write
  grpc::ByteBuffer incoming_;                         // owned by gRPC while reading_
  ReadDone reader_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Status> finish_ ABSL_GUARDED_BY(mutex_);  // to be sent when the queue is empty
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;  // this side has ended the stream; reads are dropped
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;  // the end was sent
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;    // no more writes are possible
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;     // no more reads are possible
  bool gone_ ABSL_GUARDED_BY(mutex_) = false;
};

// Calls `method` ("/shardd.v1.PeerService/Link"); the stream is begun. The caller keeps `channel` until the stream is
// gone: the last channel of a process waits for gRPC's threads when it is destroyed, and may not be destroyed on one of
// them.
std::shared_ptr<PeerStream> CallPeer(const std::shared_ptr<grpc::Channel>& channel, const std::string& method);

// The called side.
class ServedPeerStream final : public PeerStream, public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  // Makes the stream; it is also the reactor to return to gRPC.
  static std::shared_ptr<ServedPeerStream> Make(grpc::CallbackServerContext* context);
  void OnReadDone(bool ok) override { HandleRead(ok); }
  void OnWriteDone(bool ok) override { HandleWritten(ok); }
  void OnCancel() override {}
  void OnDone() override { HandleDone(absl::OkStatus()); }

 protected:
  void BeginRead(grpc::ByteBuffer* into) override { StartRead(into); }
  void BeginWrite(const grpc::ByteBuffer* bytes) override { StartWrite(bytes); }
  void BeginFinish(const absl::Status& status) override;
  bool caller() const override { return false; }
  void Cancel() override { context_->TryCancel(); }
  void Release() override {}
  void Forget() override {}

 private:
  explicit ServedPeerStream(grpc::CallbackServerContext* context) : context_(context) {}
  grpc::CallbackServerContext* const context_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_PEER_PEER_STREAM_H_
