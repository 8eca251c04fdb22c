#include "server/peer/peer_stream.h"

#include <cstring>
#include <utility>

#include "common/status/grpc_status.h"
#include "grpcpp/generic/generic_stub.h"

namespace shardd {
namespace {

absl::Status Lost() {
  return absl::UnavailableError("the other daemon has ended the stream, or the connection is lost");
}

class CallingPeerStream final : public PeerStream, public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  void Start(const std::shared_ptr<grpc::Channel>& channel, const std::string& method) {
    HoldSelf();
    grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer>(channel).PrepareBidiStreamingCall(context_.get(),
                                                                                                     method, {}, this);
    AddHold();  // other threads than gRPC's begin reads and writes, until Release
    StartCall();
  }
  void OnReadDone(bool ok) override { HandleRead(ok); }
  void OnWriteDone(bool ok) override { HandleWritten(ok); }
  void OnDone(const grpc::Status& status) override { HandleDone(FromGrpcStatus(status)); }

 protected:
  void BeginRead(grpc::ByteBuffer* into) override { StartRead(into); }
  void BeginWrite(const grpc::ByteBuffer* bytes) override { StartWrite(bytes); }
  void BeginFinish(const absl::Status&) override { StartWritesDone(); }
  bool caller() const override { return true; }
  void Cancel() override { context_->TryCancel(); }
  void Release() override { RemoveHold(); }
  void Forget() override { context_.reset(); }

 private:
  std::unique_ptr<grpc::ClientContext> context_ = std::make_unique<grpc::ClientContext>();  // it holds the channel
};

grpc::ByteBuffer Joined(const std::string& header, absl::string_view elements) {
  grpc_slice slice = grpc_slice_malloc(header.size() + elements.size());
  memcpy(GRPC_SLICE_START_PTR(slice), header.data(), header.size());
  if (!elements.empty()) {
    memcpy(GRPC_SLICE_START_PTR(slice) + header.size(), elements.data(), elements.size());
  }
  const grpc::Slice owner(slice, grpc::Slice::STEAL_REF);
  return grpc::ByteBuffer(&owner, 1);
}

}  // namespace

std::shared_ptr<PeerStream> CallPeer(const std::shared_ptr<grpc::Channel>& channel, const std::string& method) {
  auto stream = std::make_shared<CallingPeerStream>();
  stream->Start(channel, method);
  return stream;
}

std::shared_ptr<ServedPeerStream> ServedPeerStream::Make(grpc::CallbackServerContext* context) {
  std::shared_ptr<ServedPeerStream> stream(new ServedPeerStream(context));
  stream->HoldSelf();
  return stream;
}

void ServedPeerStream::BeginFinish(const absl::Status& status) {
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>::Finish(ToGrpcStatus(status));
}

void PeerStream::HoldSelf() {
  absl::MutexLock lock(&mutex_);
  self_ = shared_from_this();
}

void PeerStream::Read(ReadDone done) {
  absl::MutexLock lock(&mutex_);
  if (ended_ || draining_ || finished_) {
    return;
  }
  reader_ = std::move(done);
  if (!std::exchange(reading_, true)) {
    BeginRead(&incoming_);
  }
}

bool PeerStream::Write(grpc::ByteBuffer bytes, int64_t max_queued_bytes) {
  absl::MutexLock lock(&mutex_);
  const auto size_bytes = static_cast<int64_t>(bytes.Length());
  if (queued_bytes_ + size_bytes > max_queued_bytes) {
    return false;
  }
  if (!broken_ && !ended_ && !finish_.has_value()) {
    queued_bytes_ += size_bytes;
    queue_.push_back(
        {.bytes = std::move(bytes), .header = {}, .elements = {}, .sent = nullptr, .size_bytes = size_bytes});
    AdvanceLocked();
  }
  return true;
}

bool PeerStream::WritePiece(std::string header, absl::string_view elements, Sent& sent) {
  absl::MutexLock lock(&mutex_);
  if (broken_ || ended_ || finish_.has_value()) {
    return false;
  }
  const auto size_bytes = static_cast<int64_t>(header.size() + elements.size());
  queued_bytes_ += size_bytes;
  queue_.push_back({.bytes = {},
                    .header = std::move(header),
                    .elements = elements,
                    .sent = std::move(sent),
                    .size_bytes = size_bytes});
  AdvanceLocked();
  return true;
}

bool PeerStream::idle() const {
  absl::MutexLock lock(&mutex_);
  return broken_ || ended_ || (queue_.empty() && !writing_);
}

bool PeerStream::gone() const {
  absl::MutexLock lock(&mutex_);
  return gone_;
}

void PeerStream::Finish(absl::Status status) {
  ReadDone unused;  // releases what it holds after the mutex is released
  absl::MutexLock lock(&mutex_);
  if (finish_.has_value()) {
    return;
  }
  finish_ = std::move(status);
  std::swap(unused, reader_);
  DrainLocked();
  AdvanceLocked();
}

void PeerStream::Abort(absl::Status status) {
  std::vector<Sent> dropped;
  ReadDone unused;
  {
    absl::MutexLock lock(&mutex_);
    dropped = DropLocked();
    std::swap(unused, reader_);
    broken_ = true;
    if (!finish_.has_value()) {
      finish_ = std::move(status);
    }
    DrainLocked();
    // The end is sent after the current write, and a reader that does not read delays both.
    if (!gone_ && (caller() || writing_ || finished_)) {
      Cancel();
    }
    AdvanceLocked();
  }
  RunAll(std::move(dropped));
}

void PeerStream::AdvanceLocked() {
  if (writing_ || finished_) {
    return;
  }
  if (!queue_.empty() && !broken_) {
    Outgoing next = std::move(queue_.front());
    queue_.pop_front();
    if (next.header.empty()) {
      written_.Swap(&next.bytes);
    } else {
      grpc::ByteBuffer joined = Joined(next.header, next.elements);
      written_.Swap(&joined);
    }
    written_sent_ = std::move(next.sent);
    writing_bytes_ = next.size_bytes;
    writing_ = true;
    BeginWrite(&written_);
  } else if (finish_.has_value()) {
    finished_ = true;
    BeginFinish(*finish_);
  }
}

void PeerStream::DrainLocked() {
  draining_ = true;
  // The caller learns of the end from a failing read; the called side sends it.
  if (!ended_ && !reading_ && (caller() || !finished_)) {
    reading_ = true;
    BeginRead(&incoming_);
  }
}

std::vector<PeerStream::Sent> PeerStream::DropLocked() {
  std::vector<Sent> dropped;
  if (written_sent_ != nullptr) {
    dropped.push_back(std::exchange(written_sent_, nullptr));
  }
  for (Outgoing& outgoing : queue_) {
    if (outgoing.sent != nullptr) {
      dropped.push_back(std::move(outgoing.sent));
    }
  }
  queue_.clear();
  queued_bytes_ = writing_bytes_;
  return dropped;
}

void PeerStream::RunAll(std::vector<Sent> all) {
  for (Sent& sent : all) {
    sent(absl::UnavailableError("the link has ended"));
  }
}

void PeerStream::HandleRead(bool ok) {
  const std::shared_ptr<PeerStream> self = shared_from_this();  // Release may be the last but one step
  std::vector<Sent> dropped;
  ReadDone reader;
  grpc::ByteBuffer message;
  {
    absl::MutexLock lock(&mutex_);
    reading_ = false;
    if (ok) {
      message.Swap(&incoming_);
      if (!draining_) {
        reader = std::exchange(reader_, nullptr);
      } else if (caller() || !finished_) {
        reading_ = true;
        BeginRead(&incoming_);
      }
    } else {
      ended_ = true;
      if (caller()) {  // HandleDone has the reason
        finished_ = true;
        broken_ = true;
        dropped = DropLocked();
      } else {
        reader = std::exchange(reader_, nullptr);
        if (!finish_.has_value()) {
          finish_ = absl::AbortedError("the link has ended");
        }
        AdvanceLocked();
      }
    }
  }
  if (!ok && caller()) {
    Release();
  }
  RunAll(std::move(dropped));
  if (reader != nullptr) {
    reader(ok ? absl::StatusOr<grpc::ByteBuffer>(std::move(message)) : Lost());
  }
}

void PeerStream::HandleWritten(bool ok) {
  const std::shared_ptr<PeerStream> self = shared_from_this();
  std::vector<Sent> dropped;
  Sent sent;
  {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    queued_bytes_ -= std::exchange(writing_bytes_, 0);
    written_.Clear();
    if (ok) {
      sent = std::exchange(written_sent_, nullptr);
    } else {
      broken_ = true;
      dropped = DropLocked();
    }
    AdvanceLocked();
  }
  if (sent != nullptr) {
    sent(absl::OkStatus());
  }
  RunAll(std::move(dropped));
}

void PeerStream::HandleDone(const absl::Status& status) {
  std::shared_ptr<PeerStream> self;
  std::vector<Sent> dropped;
  ReadDone reader;
  {
    absl::MutexLock lock(&mutex_);
    gone_ = ended_ = broken_ = finished_ = true;
    Forget();
    dropped = DropLocked();
    reader = std::exchange(reader_, nullptr);
    self = std::move(self_);
  }
  RunAll(std::move(dropped));
  if (reader != nullptr) {
    reader(status.ok() ? Lost() : status);
  }
}

}  // namespace shardd
