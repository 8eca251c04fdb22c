#include "server/service/session_reactor.h"

#include <grpcpp/alarm.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/clock/monotonic_now.h"
#include "common/status/grpc_status.h"
#include "server/service/reactor_link.h"
#include "server/service/session_events.h"
#include "server/service/write_turns.h"
#include "server/session/session_stream.h"
#include "shardd/v1/trainer.pb.h"

namespace shardd {
namespace {

// Room for a step with the most trainer state (1 MiB), or 15,000 commands. Small, because the core's loop executes and
// frees it. The sender has shown its protocol version, so unknown fields are refused.
constexpr MessageLimits kCommandMessage = {4 << 20, 4 << 20, UnknownFields::kRefused};
constexpr absl::Duration kFinishPatience = absl::Seconds(10);
// From the beginning of a session stream.
constexpr absl::Duration kHelloPatience = absl::Seconds(5);

// The stream of one session. gRPC allows one write at a time and may run callbacks on any thread, even before a start
// function has returned. So one mutex guards the queue and its flags, and no function of gRPC that may call back runs
// under it (StartWrite and Finish do not).
// The core's loop begins what follows a step itself; the ends of sessions, of which a job may have a thousand at once,
// are begun on a thread of their own.
std::atomic<int> open_streams = 0;  // of this process

class SessionReactor final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  // The core's handle. It may outlive the reactor: after OnDone it leads nowhere.
  class Stream final : public SessionStream, public std::enable_shared_from_this<Stream> {
   public:
    explicit Stream(SessionReactor* reactor) : link_(reactor) {}
    void Send(v1::SessionEvent event) override {
      link_.With([&](SessionReactor& reactor) { reactor.Enqueue(std::move(event)); });
    }
    void Finish(absl::Status status) override {
      link_.With([&](SessionReactor& reactor) {
        if (!reactor.WillFinish(std::move(status))) return;
        reactor.ends_->Post([stream = shared_from_this()] { stream->End(); });
      });
    }
    void End() {
      link_.With([](SessionReactor& reactor) { reactor.BeginFinish(); });
    }
    void ReadNext() {
      link_.With([](SessionReactor& reactor) { reactor.ReadUnlessFinished(); });
    }
    void NoHello() {
      link_.With([](SessionReactor& reactor) {
        if (reactor.greeted_.load()) return;
        reactor.FinishWhenWritten(absl::DeadlineExceededError(absl::StrCat(
            "session: no hello within ", absl::FormatDuration(kHelloPatience), " of the stream's beginning")));
      });
    }
    void Cancel() {
      link_.With([](SessionReactor& reactor) { reactor.context_->TryCancel(); });
    }
    void Detach() { link_.Detach(); }

   private:
    ReactorLink<SessionReactor> link_;
  };

  SessionReactor(Core* core, grpc::CallbackServerContext* context, PeerCredentials peer,
                 std::shared_ptr<DecodedMemory> decoded, CoreLoop* ends)
      : core_(core),
        ends_(ends),
        context_(context),
        peer_(peer),
        decoded_(std::move(decoded)),
        stream_(std::make_shared<Stream>(this)) {
    ++open_streams;
    hello_patience_.Set(absl::ToChronoTime(absl::Now() + kHelloPatience), [stream = stream_](bool expired) {
      if (expired) {
        stream->NoHello();
      }
    });
    StartRead(&bytes_);
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      // The client has closed its side or is gone. The core ends the session and still sends events until then.
      if (session_id_ != 0) {
        core_->SessionStreamClosed(session_id_, stream_);
      }
      FinishWhenWritten(absl::OkStatus());
      return;
    }
    v1::SessionRequest request;
    // Only hello is acceptable first.
    absl::StatusOr<DecodedMemory::Hold> hold = DecodeFor(
        "session", bytes_, session_id_ == 0 ? kSmallMessage : kCommandMessage, peer_.uid, *decoded_, &request);
    bytes_.Clear();
    if (!hold.ok()) {
      FinishWhenWritten(hold.status());
      return;  // what it would send next is unknown
    }
    switch (request.kind_case()) {
      case v1::SessionRequest::kHello:
        if (session_id_ != 0) {
          FinishWhenWritten(absl::InvalidArgumentError("session: a second hello"));
          break;
        }
        session_id_ = request.hello().session_id();
        greeted_.store(true);
        hello_patience_.Cancel();
        core_->StartSession(session_id_, request.hello().token(), peer_, stream_,
                            [stream = stream_](absl::Status status) {
                              if (!status.ok()) {
                                stream->Finish(std::move(status));
                              }
                            });
        break;
      case v1::SessionRequest::kDetach:
        if (session_id_ == 0) {
          FinishWhenWritten(absl::FailedPreconditionError("session: the first message must be hello"));
          break;
        }
        core_->SessionDetach(session_id_, stream_, request.detach().finished());
        return;  // the last message: reads no more; the core ends the stream
      case v1::SessionRequest::kCommands:
      case v1::SessionRequest::kTellWords:
        if (session_id_ == 0) {
          FinishWhenWritten(absl::FailedPreconditionError("session: the first message must be hello"));
          break;
        }
        // The next batch is read when this one is executed, so flow control holds back a client that floods.
        core_->SessionCommands(session_id_, stream_, std::move(request),
                               [stream = stream_, hold = *std::move(hold)] { stream->ReadNext(); });
        return;
      case v1::SessionRequest::KIND_NOT_SET:
        FinishWhenWritten(absl::InvalidArgumentError("session: message of no known kind"));
        break;
    }
    StartRead(&bytes_);
  }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    turns_.Written();
    if (!ok) {
      events_.Clear();
    }
    AdvanceLocked();
  }

  void OnCancel() override { FinishWhenWritten(absl::CancelledError("session: the client went away")); }

  void OnDone() override {
    stream_->Detach();
    if (session_id_ != 0) {
      core_->SessionStreamClosed(session_id_, stream_);
    }
    --open_streams;
    delete this;
  }

 private:
  void Enqueue(v1::SessionEvent event) {
    absl::MutexLock lock(&mutex_);
    // A client that does not read loses events, but never the end, nor what its words say.
    if (!turns_.ends()) {
      const bool ends = event.has_aborted() || event.has_detached();  // Finish follows, and begins both
      events_.Add(std::move(event));
      if (!ends) AdvanceLocked();
    }
  }
  // After Finish the reactor may be deleted at any moment, so no operation may begin.
  void ReadUnlessFinished() {
    absl::MutexLock lock(&mutex_);
    if (!turns_.finished()) {
      StartRead(&bytes_);
    }
  }
  void FinishWhenWritten(absl::Status status) {
    if (WillFinish(std::move(status))) {
      BeginFinish();
    }
  }
  // False: it does already. Nothing is queued any more.
  bool WillFinish(absl::Status status) {
    absl::MutexLock lock(&mutex_);
    return turns_.End(std::move(status));
  }
  void BeginFinish() {
    absl::MutexLock lock(&mutex_);
    AdvanceLocked();
    turns_.LimitEnd(kFinishPatience, [stream = stream_] { stream->Cancel(); });
  }
  void AdvanceLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    switch (turns_.Take(!events_.empty())) {
      case WriteTurns::Next::kNothing:
        return;
      case WriteTurns::Next::kWrite:
        if (absl::StatusOr<grpc::ByteBuffer> bytes = Encode(events_.Take()); bytes.ok()) {
          written_ = *std::move(bytes);
          StartWrite(&written_);
        } else {  // the client cannot continue without it
          turns_.EndNow();
          Finish(ToGrpcStatus(bytes.status()));
        }
        return;
      case WriteTurns::Next::kFinish:
        Finish(ToGrpcStatus(turns_.why()));
    }
  }

  // Constant after construction, or used only by the read callbacks, which never run concurrently.
  Core* const core_;
  CoreLoop* const ends_;
  grpc::CallbackServerContext* const context_;
  const PeerCredentials peer_;
  const std::shared_ptr<DecodedMemory> decoded_;
  const std::shared_ptr<Stream> stream_;
  uint64_t session_id_ = 0;
  grpc::ByteBuffer bytes_;
  std::atomic<bool> greeted_ = false;  // hello has arrived
  grpc::Alarm hello_patience_;
  // Guarded. Lock order: that of Stream::link_ before mutex_.
  absl::Mutex mutex_;
  SessionEvents events_ ABSL_GUARDED_BY(mutex_);
  grpc::ByteBuffer written_ ABSL_GUARDED_BY(mutex_);
  WriteTurns turns_ ABSL_GUARDED_BY(mutex_);
};

class RefusedReactor final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  explicit RefusedReactor(const absl::Status& status) { Finish(ToGrpcStatus(status)); }
  void OnDone() override { delete this; }
};

}  // namespace

SessionStreamReactor* ServeSession(Core* core, grpc::CallbackServerContext* context, PeerCredentials peer,
                                   std::shared_ptr<DecodedMemory> decoded, CoreLoop* ends) {
  return new SessionReactor(core, context, peer, std::move(decoded), ends);
}

bool AwaitSessionStreams(absl::Duration limit) {
  for (const absl::Time end = MonotonicNow() + limit; open_streams > 0; absl::SleepFor(absl::Milliseconds(1))) {
    if (MonotonicNow() >= end) return false;
  }
  return true;
}

SessionStreamReactor* RefuseSession(const absl::Status& status) { return new RefusedReactor(status); }

}  // namespace shardd
