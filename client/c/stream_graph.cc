// CUDA graphs in the program's stream: their words, and their launches.

#include "absl/strings/str_cat.h"
#include "client/c/stream_order.h"
#include "common/status/status_macros.h"

namespace shardd {

absl::Status StreamOrder::CheckNotCapturing(const char* what, cu::Stream stream) const {
  int capturing = cu::kCaptureNone;
  SHARDD_RETURN_IF_ERROR(
      Check(driver_->StreamIsCapturing(stream, &capturing), "cuStreamIsCapturing", "the program's stream"));
  if (capturing == cu::kCaptureNone) {
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
  int capturing = cu::kCaptureNone;
  SHARDD_RETURN_IF_ERROR(
      Check(driver_->StreamIsCapturing(stream_, &capturing), "cuStreamIsCapturing", "the program's stream"));
  if (capturing != cu::kCaptureActive) {
    return absl::FailedPreconditionError(
        absl::StrCat("the stream of shardd_set_cuda_stream is not being captured (got capture status ", capturing,
                     ", want ", cu::kCaptureActive, "; rank=", options_.rank,
                     "); begin the capture behind shardd_begin_graph, and end it ", "behind shardd_end_graph"));
  }
  return wait ? words->AddWait(stream_) : words->AddSignal(stream_);
}

absl::Status StreamOrder::LaunchGraph(cu::GraphExec exec, GraphWords* words) {
  const ScopedCudaContext current(driver_, context_);
  SHARDD_RETURN_IF_ERROR(Check(current.result(), "cuCtxPushCurrent", ""));
  SHARDD_RETURN_IF_ERROR(CheckNotCapturing("launch_graph"));
  {
    absl::MutexLock lock(&mutex_);  // watched from before it is launched
    graph_ = words;
  }
  absl::Status status = Check(driver_->GraphLaunch(exec, stream_), "cuGraphLaunch", "the program's stream");
  if (!status.ok()) {
    EndGraph();
  }
  return status;
}

void StreamOrder::EndGraph() {
  absl::MutexLock lock(&mutex_);
  graph_ = nullptr;
}

}  // namespace shardd
