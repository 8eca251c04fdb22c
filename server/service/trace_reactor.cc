#include "server/service/trace_reactor.h"

#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/status/grpc_status.h"
#include "server/service/message.h"

namespace shardd {
namespace {

// How long a reader has, after the end of the trace, for what is queued.
constexpr absl::Duration kFinishPatience = absl::Seconds(10);

}  // namespace

// Leads to the reactor while there is one.
class TraceReactor::Sink {
 public:
  explicit Sink(TraceReactor* reactor) : reactor_(reactor) {}

  bool Send(const v1::TraceJobResponse& message) {
    absl::MutexLock lock(&mutex_);
    return reactor_ != nullptr && reactor_->Enqueue(message);
  }
  void Finish(absl::Status status) {
    absl::MutexLock lock(&mutex_);
    if (reactor_ != nullptr) {
      reactor_->FinishWhenWritten(std::move(status));
    }
  }
  bool gone() const {
    absl::MutexLock lock(&mutex_);
    return reactor_ == nullptr || gone_;
  }
  void SetGone() {
    absl::MutexLock lock(&mutex_);
    gone_ = true;
  }
  void Cancel() {
    absl::MutexLock lock(&mutex_);
    if (reactor_ != nullptr) {
      reactor_->context_->TryCancel();
    }
  }
  void Detach() {
    absl::MutexLock lock(&mutex_);
    reactor_ = nullptr;
  }

 private:
  mutable absl::Mutex mutex_;
  TraceReactor* reactor_ ABSL_GUARDED_BY(mutex_);
  bool gone_ ABSL_GUARDED_BY(mutex_) = false;
};

TraceReactor::TraceReactor(grpc::CallbackServerContext* context)
    : context_(context), sink_(std::make_shared<Sink>(this)) {}

std::shared_ptr<TraceSink> TraceReactor::sink() const {
  class Handle final : public TraceSink {
   public:
    explicit Handle(std::shared_ptr<Sink> sink) : sink_(std::move(sink)) {}
    // Dropped without a word; after Finish it changes nothing.
    ~Handle() override { sink_->Finish(absl::CancelledError("trace job: the daemon is shutting down")); }
    bool Send(const v1::TraceJobResponse& message) override { return sink_->Send(message); }
    void Finish(absl::Status status) override { sink_->Finish(std::move(status)); }
    bool gone() const override { return sink_->gone(); }

   private:
    const std::shared_ptr<Sink> sink_;
  };
  return std::make_shared<Handle>(sink_);
}

bool TraceReactor::Enqueue(const v1::TraceJobResponse& message) {
  absl::StatusOr<grpc::ByteBuffer> bytes = Encode(message);
  if (!bytes.ok()) {
    return false;
  }
  absl::MutexLock lock(&mutex_);
  if (finish_.has_value() || (message.has_spans() && queued_bytes_ + bytes->Length() > kMaxQueuedBytes)) {
    return false;
  }
  queued_bytes_ += bytes->Length();
  sizes_bytes_.push_back(bytes->Length());
  queue_.push_back(*std::move(bytes));
  AdvanceLocked();
  return true;
}

void TraceReactor::OnWriteDone(bool ok) {
  absl::MutexLock lock(&mutex_);
  writing_ = false;
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
  if (finish_.has_value()) {
    return;
  }
  finish_ = std::move(status);
  AdvanceLocked();
  if (!finished_) {
    patience_.Set(absl::ToChronoTime(absl::Now() + kFinishPatience), [sink = sink_](bool expired) {
      if (expired) {
        sink->Cancel();
      }
    });
  }
}

void TraceReactor::AdvanceLocked() {
  if (writing_ || finished_) {
    return;
  }
  if (!queue_.empty()) {
    writing_ = true;
    StartWrite(&queue_.front());
  } else if (finish_.has_value()) {
    finished_ = true;
    Finish(ToGrpcStatus(*finish_));
  }
}

}  // namespace shardd
