#include "client/c/gpu/stream_order.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/c/gpu/stream_context.h"
#include "client/c/host/quiet_thread.h"
#include "common/shm/session_view.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

constexpr absl::Duration kLook = absl::Milliseconds(20);   // at waits, whether they have expired
constexpr absl::Duration kPoison = absl::Milliseconds(1);  // words, until the streams have drained
constexpr absl::Duration kPoll = absl::Microseconds(50);   // of the host for the GPU
constexpr absl::Duration kForgetLimit = absl::Seconds(1);

}  // namespace

absl::StatusOr<std::unique_ptr<StreamOrder>> StreamOrder::Create(const Options& options) {
  auto order = absl::WrapUnique(new StreamOrder(options));
  if (absl::Status status = order->Init(); !status.ok()) {
    order->drained_ = true;
    return status;
  }
  return order;
}

absl::Status StreamOrder::Init() {
  SHARDD_RETURN_IF_ERROR(RetainRanksContext(driver_, options_.ordinal, &device_, &context_));
  const ScopedCudaContext current(driver_, context_);
  SHARDD_RETURN_IF_ERROR(Check(current.result(), "cuCtxPushCurrent", ""));
  SHARDD_RETURN_IF_ERROR(
      Check(driver_->EventCreate(&event_, CU_EVENT_DISABLE_TIMING), "cuEventCreate", "order of the streams"));
  fallback_ = options_.words.ok() ? InitWords() : options_.words;
  return absl::OkStatus();
}

absl::Status StreamOrder::InitWords() {
  SHARDD_ASSIGN_OR_RETURN(const bool has_memops, HasStreamMemoryOperations(driver_, device_));
  if (!has_memops) {
    return absl::UnimplementedError("the GPU has no 64-bit stream memory operations");
  }
  constexpr unsigned kFlags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
  SHARDD_RETURN_IF_ERROR(Check(driver_->MemHostRegister(options_.client_page, kPageBytes, kFlags), "cuMemHostRegister",
                               "the client's page"));
  client_registered_ = true;
  SHARDD_RETURN_IF_ERROR(
      Check(driver_->MemHostRegister(options_.daemon_page, static_cast<size_t>(options_.daemon_page_bytes), kFlags),
            "cuMemHostRegister", "the daemon's page"));
  daemon_registered_ = true;
  SHARDD_RETURN_IF_ERROR(Check(driver_->MemHostGetDevicePointer(&done_, &options_.client_page->done, 0),
                               "cuMemHostGetDevicePointer", "the client's page"));
  SHARDD_RETURN_IF_ERROR(Check(driver_->MemHostGetDevicePointer(&daemon_page_, options_.daemon_page, 0),
                               "cuMemHostGetDevicePointer", "the daemon's page"));
  SHARDD_ASSIGN_OR_RETURN(signals_, CreateFirstStream(driver_, "signals"));
  return absl::OkStatus();
}

StreamOrder::~StreamOrder() {
  if (watches_) {
    {
      absl::MutexLock lock(&mutex_);
      ending_ = true;
      changed_.NotifyAll();
    }
    pthread_join(watcher_, nullptr);
  }
  if (!drained_ || context_ == nullptr) {
    for (const auto& graph : graphs_) graph->Leak();
    return;  // what a stream still names stays
  }
  {
    const ScopedCudaContext current(driver_, context_);
    graphs_.clear();
    if (signals_ != nullptr) (void)driver_->StreamDestroy(signals_);
    if (event_ != nullptr) (void)driver_->EventDestroy(event_);
    if (daemon_registered_) (void)driver_->MemHostUnregister(options_.daemon_page);
    if (client_registered_) (void)driver_->MemHostUnregister(options_.client_page);
  }
  (void)driver_->DevicePrimaryCtxRelease(device_);
}

absl::Status StreamOrder::Use(CUstream stream) {
  if (has_stream_ && stream == stream_) {
    return absl::OkStatus();
  }
  if (stream == CU_STREAM_PER_THREAD) {
    return absl::InvalidArgumentError(
        "set_cuda_stream: cudaStreamPerThread is another stream in every thread; name one that the program has made, "
        "or "
        "NULL, the legacy default stream");
  }
  const ScopedCudaContext current(driver_, context_);
  SHARDD_RETURN_IF_ERROR(Check(current.result(), "cuCtxPushCurrent", ""));
  SHARDD_RETURN_IF_ERROR(CheckNotCapturing("set_cuda_stream", stream));
  if (has_stream_) {
    SHARDD_RETURN_IF_ERROR(Check(driver_->EventRecord(event_, stream_), "cuEventRecord", "the stream before"));
    SHARDD_RETURN_IF_ERROR(Check(driver_->StreamWaitEvent(stream, event_, 0), "cuStreamWaitEvent", "the new stream"));
  } else if (const absl::Status status = Check(driver_->EventRecord(event_, stream), "cuEventRecord", "the new stream");
             !status.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("set_cuda_stream: not a stream of the primary context of cuda_device: ", status.message()));
  }
  stream_ = stream;
  has_stream_ = true;
  if (by_stream() && !watches_) {
    watches_ = StartQuietThread(&watcher_, &StreamOrder::WatchMain, this) == 0;
    if (!watches_) {
      return absl::ResourceExhaustedError("set_cuda_stream: no thread to watch the stream's waits");
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> StreamOrder::Signal(const std::string& what, const std::function<absl::Status()>& slice) {
  const ScopedCudaContext current(driver_, context_);
  SHARDD_RETURN_IF_ERROR(Check(current.result(), "cuCtxPushCurrent", ""));
  SHARDD_RETURN_IF_ERROR(CheckNotCapturing(what.c_str()));
  const auto wait_until = [&](const std::function<bool()>& come) -> absl::Status {
    const Deadline deadline = Deadline::In(options_.timeout);
    while (!come() && !options_.over()) {
      SHARDD_RETURN_IF_ERROR(slice());
      if (deadline.HasPassed()) {
        return absl::DeadlineExceededError(absl::StrCat(
            what, ": the program's stream 0x", absl::Hex(reinterpret_cast<uintptr_t>(stream_)),
            " has not come there within ", absl::FormatDuration(options_.timeout), " (rank=", options_.rank, ")"));
      }
      absl::SleepFor(kPoll);
    }
    return absl::OkStatus();
  };
  if (!by_stream()) {
    SHARDD_RETURN_IF_ERROR(Check(driver_->EventRecord(event_, stream_), "cuEventRecord", "the program's stream"));
    CUresult result = CUDA_ERROR_NOT_READY;
    SHARDD_RETURN_IF_ERROR(wait_until([&] { return (result = driver_->EventQuery(event_)) != CUDA_ERROR_NOT_READY; }));
    SHARDD_RETURN_IF_ERROR(result == CUDA_ERROR_NOT_READY ? absl::OkStatus()
                                                          : Check(result, "cuEventQuery", "the program's stream"));
    return 0;
  }
  SHARDD_RETURN_IF_ERROR(wait_until([&] {
    const uint64_t done = options_.client_page->done.load(std::memory_order_acquire);
    return signalled_ - TimelineSequence(done) < kMaxSignals;
  }));
  SHARDD_RETURN_IF_ERROR(Check(driver_->EventRecord(event_, stream_), "cuEventRecord", "the program's stream"));
  SHARDD_RETURN_IF_ERROR(Check(driver_->StreamWaitEvent(signals_, event_, 0), "cuStreamWaitEvent", "signals"));
  SHARDD_RETURN_IF_ERROR(
      Check(driver_->StreamWriteValue64(signals_, done_, TimelineValue(options_.epoch, signalled_ + 1),
                                        CU_STREAM_WRITE_VALUE_DEFAULT),
            "cuStreamWriteValue64", "done"));
  return ++signalled_;
}

void StreamOrder::PruneLocked() {
  outstanding_.remove_if([](const Outstanding& wait) {
    return static_cast<int64_t>(wait.word->load(std::memory_order_acquire) - wait.value) >= 0;
  });
}

bool StreamOrder::MayAwait() {
  absl::MutexLock lock(&mutex_);
  if (!release_) {  // else words were moved, and have to be again
    PruneLocked();
  }
  return outstanding_.size() < kMaxWaits && !release_;
}

absl::Status StreamOrder::Await(const TimelineWord& word, uint64_t value, std::string what) {
  const ScopedCudaContext current(driver_, context_);
  SHARDD_RETURN_IF_ERROR(Check(current.result(), "cuCtxPushCurrent", ""));
  SHARDD_RETURN_IF_ERROR(CheckNotCapturing(what.c_str()));
  // The page is mapped writable; only its view here is not.
  auto* const mutable_word = const_cast<TimelineWord*>(&word);
  const auto offset = reinterpret_cast<const char*>(&word) - static_cast<const char*>(options_.daemon_page);
  absl::StrAppend(&what, " did not come to stream 0x", absl::Hex(reinterpret_cast<uintptr_t>(stream_)), " within ",
                  absl::FormatDuration(options_.timeout));
  {
    absl::MutexLock lock(&mutex_);  // watched from before it is enqueued, and not held over the call
    outstanding_.push_back({mutable_word, value, Deadline::In(options_.timeout), std::move(what)});
  }
  return Check(driver_->StreamWaitValue64(stream_, daemon_page_ + static_cast<CUdeviceptr>(offset), value,
                                          CU_STREAM_WAIT_VALUE_GEQ),
               "cuStreamWaitValue64", "the program's stream");
}

absl::Status StreamOrder::expired() const {
  absl::MutexLock lock(&mutex_);
  return expired_;
}

void* StreamOrder::WatchMain(void* self) {
  pthread_setname_np(pthread_self(), "shardd-streams");
  static_cast<StreamOrder*>(self)->Watch();
  return nullptr;
}

void StreamOrder::Watch() {
  const uint64_t released = TimelineValue(options_.epoch + 1, 0);
  absl::MutexLock lock(&mutex_);
  while (!ending_) {
    const bool idle = IdleLocked();
    const auto wakes = [this, idle]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return ending_ || (release_ && !idle) || IdleLocked() != idle;
    };
    if (idle) {
      mutex_.Await(absl::Condition(&wakes));
    } else if (release_) {
      const auto ends = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ending_; };
      (void)changed_.Await(&mutex_, ends, Deadline::In(kPoison));
    } else {
      (void)changed_.Await(&mutex_, wakes, Deadline::In(kLook));
    }
    if (!release_) {
      PruneLocked();
      for (const Outstanding& wait : outstanding_) {
        if (!wait.deadline.HasPassed()) {
          continue;
        }
        const uint64_t word = wait.word->load(std::memory_order_acquire);
        expired_ = absl::DeadlineExceededError(absl::StrCat(
            wait.what, " (got ", TimelineSequence(word), ", want ", TimelineSequence(wait.value), "; rank=",
            options_.rank, "); the stream was let go, what it has computed since is void; call shardd_reattach"));
        has_expired_.store(true, std::memory_order_release);
        release_ = true;
        break;
      }
      release_ = release_ || (!IdleLocked() && options_.over());
    }
    if (release_ && !IdleLocked()) {
      options_.client_page->is_void.store(1, std::memory_order_seq_cst);
      if (graph_ != nullptr) graph_->End();
      for (const Outstanding& wait : outstanding_) {
        TimelineStore(*wait.word, released, nullptr);
      }
    }
  }
}

absl::Status StreamOrder::RecordAll() {
  SHARDD_RETURN_IF_ERROR(Check(driver_->EventRecord(event_, stream_), "cuEventRecord", "the program's stream"));
  if (signals_ == nullptr) {
    return absl::OkStatus();
  }
  SHARDD_RETURN_IF_ERROR(Check(driver_->StreamWaitEvent(signals_, event_, 0), "cuStreamWaitEvent", "signals"));
  return Check(driver_->EventRecord(event_, signals_), "cuEventRecord", "signals");
}

void StreamOrder::Forget() {
  (void)Drain(/*release=*/false, kForgetLimit);  // of the signals behind it
  stream_ = nullptr;
  has_stream_ = false;
}

bool StreamOrder::Drain(bool release, absl::Duration limit, const std::function<bool()>& stop) {
  if (release) {
    absl::MutexLock lock(&mutex_);
    if (!release_) {
      PruneLocked();  // a wait that has come is not let go: what is signalled behind it is good
    }
    release_ = true;
    changed_.NotifyAll();
  }
  if (!has_stream_ || drained_) {
    drained_ = drained_ || release;
    return true;
  }
  const Deadline deadline = Deadline::In(limit);
  while (launch_ != nullptr && !launch_->Await(Deadline::In(kLook)).has_value()) {
    if (deadline.HasPassed() || (stop != nullptr && stop())) {
      return false;  // any call of the driver's might wait for that one
    }
  }
  const ScopedCudaContext current(driver_, context_);
  // A context that is lost, or gone with the process' driver, runs nothing any more.
  if (current.result() != CUDA_SUCCESS || !RecordAll().ok()) {
    return drained_ = true;
  }
  CUresult result = CUDA_ERROR_NOT_READY;
  while ((result = driver_->EventQuery(event_)) == CUDA_ERROR_NOT_READY && !deadline.HasPassed() &&
         (stop == nullptr || !stop())) {
    absl::SleepFor(kPoll);
  }
  drained_ = release && result != CUDA_ERROR_NOT_READY;
  return result != CUDA_ERROR_NOT_READY;
}

}  // namespace shardd
