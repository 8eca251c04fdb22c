// CUDA graphs in the program's stream: their words, and their launches.

#include <pthread.h>

#include <memory>

#include "absl/strings/str_cat.h"
#include "client/c/gpu/stream_order.h"
#include "client/c/host/quiet_thread.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

constexpr absl::Duration kSlice = absl::Milliseconds(50);
// A launch that the driver refuses it refuses sooner, and then nothing has been sent.
constexpr absl::Duration kRefusal = absl::Microseconds(500);

}  // namespace

absl::Status StreamOrder::CheckNotCapturing(const char* what, CUstream stream) const {
  CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
  SHARDD_RETURN_IF_ERROR(
      Check(driver_->StreamIsCapturing(stream, &capturing), "cuStreamIsCapturing", "the program's stream"));
  if (capturing == CU_STREAM_CAPTURE_STATUS_NONE) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat(what, ": stream 0x", absl::Hex(reinterpret_cast<uintptr_t>(stream)),
                   " is being captured into a CUDA graph, whose launches would all wait for what this one waits for "
                   "(rank=",
                   options_.rank, "); call shardd_begin_graph before the capture begins, or capture what lies between ",
                   "the library's calls"));
}

absl::StatusOr<GraphWords*> StreamOrder::MakeGraphWords() {
  const ScopedCudaContext current(driver_, context_);
  SHARDD_RETURN_IF_ERROR(Check(current.result(), "cuCtxPushCurrent", ""));
  SHARDD_RETURN_IF_ERROR(CheckNotCapturing("begin_graph"));
  SHARDD_ASSIGN_OR_RETURN(std::unique_ptr<GraphWords> words, GraphWords::Make(driver_));
  graphs_.push_back(std::move(words));
  return graphs_.back().get();
}

bool StreamOrder::FreeGraphWords(GraphWords* words) {
  if (absl::MutexLock lock(&mutex_); graph_ == words) {
    return false;  // of a launch that has failed: they are let go until the session is gone
  }
  if (!words->idle()) {
    return false;
  }
  const ScopedCudaContext current(driver_, context_);
  graphs_.remove_if([words](const std::unique_ptr<GraphWords>& graph) { return graph.get() == words; });
  return true;
}

absl::StatusOr<int> StreamOrder::AddToGraph(GraphWords* words, bool wait) {
  const ScopedCudaContext current(driver_, context_);
  SHARDD_RETURN_IF_ERROR(Check(current.result(), "cuCtxPushCurrent", ""));
  CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
  SHARDD_RETURN_IF_ERROR(
      Check(driver_->StreamIsCapturing(stream_, &capturing), "cuStreamIsCapturing", "the program's stream"));
  if (capturing != CU_STREAM_CAPTURE_STATUS_ACTIVE) {
    return absl::FailedPreconditionError(
        absl::StrCat("the stream of shardd_set_cuda_stream is not being captured (got capture status ", capturing,
                     ", want ", CU_STREAM_CAPTURE_STATUS_ACTIVE, "; rank=", options_.rank,
                     "); begin the capture behind shardd_begin_graph, and end it ", "behind shardd_end_graph"));
  }
  return wait ? words->AddWait(stream_) : words->AddSignal(stream_);
}

void* StreamOrder::LaunchMain(void* of) {
  pthread_setname_np(pthread_self(), "shardd-graph");
  const std::unique_ptr<std::shared_ptr<GraphLaunch>> launch(static_cast<std::shared_ptr<GraphLaunch>*>(of));
  GraphLaunch& it = **launch;
  const ScopedCudaContext current(*it.driver, it.context);
  absl::Status status = it.driver->Check(current.result(), "cuCtxPushCurrent", "");
  if (status.ok()) {
    status = it.driver->Check((*it.driver)->GraphLaunch(it.exec, it.stream), "cuGraphLaunch", "the program's stream");
  }
  it.Return(std::move(status));
  return nullptr;
}

void StreamOrder::GraphLaunch::Return(absl::Status what) {
  absl::MutexLock lock(&mutex);
  status = std::move(what);
  changed.NotifyAll();
}

absl::optional<absl::Status> StreamOrder::GraphLaunch::Await(Deadline deadline) {
  const auto returned = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex) { return status.has_value(); };
  absl::MutexLock lock(&mutex);
  (void)changed.Await(&mutex, returned, deadline);
  return status;
}

absl::Status StreamOrder::LaunchGraph(CUgraphExec exec, GraphWords* words) {
  if (launch_ != nullptr && !launch_->Await(Deadline::In(absl::ZeroDuration())).has_value()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the driver has not taken the launch before (rank=", options_.rank, ")"));
  }
  {
    const ScopedCudaContext current(driver_, context_);
    SHARDD_RETURN_IF_ERROR(Check(current.result(), "cuCtxPushCurrent", ""));
    SHARDD_RETURN_IF_ERROR(CheckNotCapturing("launch_graph"));
  }
  {
    absl::MutexLock lock(&mutex_);  // watched from before it is launched
    graph_ = words;
  }
  launch_ = std::make_shared<GraphLaunch>();
  launch_->driver = &driver_;
  launch_->context = context_;
  launch_->exec = exec;
  launch_->stream = stream_;
  pthread_t thread = 0;
  auto of = std::make_unique<std::shared_ptr<GraphLaunch>>(launch_);
  if (StartQuietThread(&thread, &StreamOrder::LaunchMain, of.get()) != 0) {
    launch_ = nullptr;
    EndGraph();
    return absl::ResourceExhaustedError(absl::StrCat("no thread for the graph's launch (rank=", options_.rank, ")"));
  }
  (void)of.release();  // the thread's
  (void)pthread_detach(thread);
  if (const auto refused = launch_->Await(Deadline::In(kRefusal)); refused.has_value() && !refused->ok()) {
    EndGraph();
    return *refused;
  }
  return absl::OkStatus();
}

absl::Status StreamOrder::launch_status() const {
  return launch_ == nullptr ? absl::OkStatus()
                            : launch_->Await(Deadline::In(absl::ZeroDuration())).value_or(absl::OkStatus());
}

absl::Status StreamOrder::AwaitLaunch(const std::function<absl::Status()>& slice) {
  const Deadline deadline = Deadline::In(options_.timeout);
  while (launch_ != nullptr && !launch_->Await(Deadline::In(kSlice)).has_value()) {
    SHARDD_RETURN_IF_ERROR(slice());
    if (deadline.HasPassed()) {
      return absl::DeadlineExceededError(absl::StrCat("the driver has not taken the graph's launch within ",
                                                      absl::FormatDuration(options_.timeout), " (rank=", options_.rank,
                                                      ")"));
    }
  }
  return launch_status();
}

void StreamOrder::EndGraph() {
  absl::MutexLock lock(&mutex_);
  graph_ = nullptr;
}

}  // namespace shardd
