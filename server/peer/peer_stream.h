#ifndef SHARDD_SERVER_PEER_PEER_STREAM_H_
#define SHARDD_SERVER_PEER_PEER_STREAM_H_

// One gRPC stream between two daemons, the same for the side that called and the one that was called: bytes in, bytes
// out, an end. gRPC wants one read and one write at a time, nothing begun once the end was said, and the object to live
// until OnDone; all of that is kept here.

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

// Thread-safe. Lives until gRPC is done with it, whoever lets go of it before.
class PeerStream : public std::enable_shared_from_this<PeerStream> {
 public:
  using ReadDone = std::function<void(absl::StatusOr<grpc::ByteBuffer>)>;
  using Sent = std::function<void(absl::Status)>;

  virtual ~PeerStream() = default;
  PeerStream(const PeerStream&) = delete;
  PeerStream& operator=(const PeerStream&) = delete;

  // The next message, or how the stream has ended: for the side that called what the other one said, UNAVAILABLE where
  // the connection is lost. One at a time; `done` runs on a thread of gRPC, never within the call, and not at all
  // behind Finish or Abort of this side.
  void Read(ReadDone done) ABSL_LOCKS_EXCLUDED(mutex_);
  // In order. False, and nothing is written: more than `max_queued_bytes` would wait with it.
  bool Write(grpc::ByteBuffer bytes, int64_t max_queued_bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  // The same of `header` and `elements` behind it, which are copied when it is their turn: gRPC may hold what it was
  // given for as long as the kernel has it, which is until a keepalive fails where the other daemon is stopped. `sent`
  // runs once, on a thread of gRPC or of Abort, never within the call. False: nothing can be written any more, and
  // `sent` is the caller's still.
  bool WritePiece(std::string header, absl::string_view elements, Sent& sent) ABSL_LOCKS_EXCLUDED(mutex_);
  // Nothing waits to be written.
  bool idle() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends it when what is queued is written; what still comes is dropped.
  void Finish(absl::Status status) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends it now: what is queued is dropped, each `sent` has run when this returns or runs on another thread already.
  void Abort(absl::Status status) ABSL_LOCKS_EXCLUDED(mutex_);
  // gRPC is done with it.
  bool gone() const ABSL_LOCKS_EXCLUDED(mutex_);

 protected:
  PeerStream() = default;
  virtual bool caller() const = 0;
  // Of the reactor. The first four begin an operation, never call back and are called with the mutex held.
  virtual void BeginRead(grpc::ByteBuffer* into) = 0;
  virtual void BeginWrite(const grpc::ByteBuffer* bytes) = 0;
  virtual void BeginFinish(const absl::Status& status) = 0;
  virtual void Cancel() = 0;
  // Of the side that called: nothing is begun any more.
  virtual void Release() = 0;

  // What gRPC calls.
  void HandleRead(bool ok) ABSL_LOCKS_EXCLUDED(mutex_);
  void HandleWritten(bool ok) ABSL_LOCKS_EXCLUDED(mutex_);
  // The last one: lets go of itself.
  void HandleDone(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  // Holds itself until HandleDone.
  void HoldSelf() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Outgoing {
    grpc::ByteBuffer bytes;  // or header and elements
    std::string header;
    absl::string_view elements;
    Sent sent;
    int64_t size_bytes = 0;
  };
  void AdvanceLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DrainLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes all that waits, for their `sent` to be run without the mutex.
  std::vector<Sent> DropLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void RunAll(std::vector<Sent> all);

  mutable absl::Mutex mutex_;
  std::shared_ptr<PeerStream> self_ ABSL_GUARDED_BY(mutex_);
  std::deque<Outgoing> queue_ ABSL_GUARDED_BY(mutex_);
  int64_t queued_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // of the queue and of what is being written
  int64_t writing_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  grpc::ByteBuffer written_ ABSL_GUARDED_BY(mutex_);  // being written
  Sent written_sent_ ABSL_GUARDED_BY(mutex_);         // of it
  grpc::ByteBuffer incoming_;                         // gRPC's while reading_
  ReadDone reader_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Status> finish_ ABSL_GUARDED_BY(mutex_);  // to be said when the queue is empty
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;  // this side has ended it: what is read is dropped
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;  // the end was said
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;    // nothing can be written any more
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;     // nothing can be read any more
  bool gone_ ABSL_GUARDED_BY(mutex_) = false;
};

// Of the side that calls `method` ("/shardd.v1.PeerService/Link"); begun.
std::shared_ptr<PeerStream> CallPeer(const std::shared_ptr<grpc::Channel>& channel, const std::string& method);

// Of the side that is called.
class ServedPeerStream final : public PeerStream, public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  // The reactor that gRPC is to be given.
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

 private:
  explicit ServedPeerStream(grpc::CallbackServerContext* context) : context_(context) {}
  grpc::CallbackServerContext* const context_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_PEER_PEER_STREAM_H_
