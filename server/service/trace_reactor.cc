#include "server/service/trace_reactor.h"

#include <atomic>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "common/status/grpc_status.h"
#include "server/observe/trace_sink.h"
#include "server/service/message.h"
#include "server/service/reactor_link.h"

namespace shardd {
namespace {

// Time for a reader, after the end of the trace, to take what is queued.
constexpr absl::Duration kTraceFinishPatience = absl::Seconds(10);

}  // namespace

class TraceReactor::Sink {
 public:
  explicit Sink(TraceReactor* reactor) : link_(reactor) {}

  void Prepare(const v1::TraceJobResponse& start) {
    link_.With([&](TraceReactor& reactor) { EndUnless(reactor.Prepare(start), reactor); });
  }
  bool Send(const v1::TraceJobResponse& message) {
    bool taken = false;
    link_.With([&](TraceReactor& reactor) {
      const absl::StatusOr<bool> sent = reactor.Enqueue(message);
      EndUnless(sent.status(), reactor);
      taken = sent.ok() && *sent;
    });
    return taken;
  }
  void Finish(absl::Status status) {
    link_.With([&](TraceReactor& reactor) { reactor.FinishWhenWritten(std::move(status)); });
  }
  bool gone() const { return gone_.load(); }
  void SetGone() { gone_ = true; }
  void Cancel() {
    link_.With([](TraceReactor& reactor) { reactor.context_->TryCancel(); });
  }
  void Detach() {
    link_.Detach();
    SetGone();
  }

 private:
  // A trace with an unreported gap would be taken for a complete one.
  void EndUnless(const absl::Status& status, TraceReactor& reactor) {
    if (!status.ok()) {
      reactor.FinishWhenWritten(status);
      SetGone();
    }
  }

  ReactorLink<TraceReactor> link_;
  std::atomic<bool> gone_ = false;
};

TraceReactor::TraceReactor(grpc::CallbackServerContext* context)
    : context_(context), sink_(std::make_shared<Sink>(this)) {}

std::shared_ptr<TraceSink> TraceReactor::sink() const {
  class Handle final : public TraceSink {
   public:
    explicit Handle(std::shared_ptr<Sink> sink) : sink_(std::move(sink)) {}
    // Dropped without Finish; after Finish this changes nothing.
    ~Handle() override { sink_->Finish(absl::CancelledError("trace job: the daemon is shutting down")); }
    void Prepare(const v1::TraceJobResponse& start) override { sink_->Prepare(start); }
    bool Send(const v1::TraceJobResponse& message) override { return sink_->Send(message); }
    void Finish(absl::Status status) override { sink_->Finish(std::move(status)); }
    bool gone() const override { return sink_->gone(); }

   private:
    const std::shared_ptr<Sink> sink_;
  };
  return std::make_shared<Handle>(sink_);
}

absl::Status TraceReactor::Prepare(const v1::TraceJobResponse& start) {
  absl::StatusOr<grpc::ByteBuffer> bytes = Encode(start);
  if (bytes.ok()) {
    absl::MutexLock lock(&mutex_);
    prepared_ = *std::move(bytes);
  }
  return bytes.status();
}

absl::StatusOr<bool> TraceReactor::Enqueue(const v1::TraceJobResponse& message) {
  absl::MutexLock lock(&mutex_);
  // First, because encoding takes longer than this check.
  if (turns_.ends() || (message.has_spans() && queued_bytes_ + message.ByteSizeLong() > kMaxQueuedBytes)) {
    return false;
  }
  absl::StatusOr<grpc::ByteBuffer> bytes = Encode(message);
  if (!bytes.ok()) {
    return bytes.status();
  }
  if (message.has_start() && prepared_.Valid()) {
    std::vector<grpc::Slice> slices, more;
    prepared_.Dump(&slices);
    bytes->Dump(&more);
    slices.insert(slices.end(), more.begin(), more.end());
    bytes = grpc::ByteBuffer(slices.data(), slices.size());
    prepared_.Clear();
  }
  queued_bytes_ += bytes->Length();
  sizes_bytes_.push_back(bytes->Length());
  queue_.push_back(*std::move(bytes));
  AdvanceLocked();
  return true;
}

void TraceReactor::OnWriteDone(bool ok) {
  absl::MutexLock lock(&mutex_);
  turns_.Written();
  queued_bytes_ -= sizes_bytes_.front();
  sizes_bytes_.pop_front();
  queue_.pop_front();
  if (!ok) {
    queue_.clear();
    sizes_bytes_.clear();
    queued_bytes_ = 0;
  }
  AdvanceLocked();
}

void TraceReactor::OnCancel() {
  sink_->SetGone();
  FinishWhenWritten(absl::CancelledError("trace job: the caller went away"));
}

void TraceReactor::OnDone() {
  sink_->Detach();
  delete this;
}

void TraceReactor::FinishWhenWritten(absl::Status status) {
  absl::MutexLock lock(&mutex_);
  if (!turns_.End(std::move(status))) {
    return;
  }
  AdvanceLocked();
  turns_.LimitEnd(kTraceFinishPatience, [sink = sink_] { sink->Cancel(); });
}

void TraceReactor::AdvanceLocked() {
  switch (turns_.Take(!queue_.empty())) {
    case WriteTurns::Next::kNothing:
      return;
    case WriteTurns::Next::kWrite:
      StartWrite(&queue_.front());
      return;
    case WriteTurns::Next::kFinish:
      Finish(ToGrpcStatus(turns_.why()));
  }
}

}  // namespace shardd
