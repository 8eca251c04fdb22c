// Order by the program's CUDA stream: which one, and what a record gives back with it.

#include <atomic>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "client/c/client_job.h"
#include "common/status/status_macros.h"

namespace shardd {

absl::Status ClientJob::SetCudaStream(void* stream) {
  SHARDD_RETURN_IF_ERROR(Live());
  if (!session_->on_device()) {
    return absl::FailedPreconditionError(absl::StrCat("set_cuda_stream job \"", spec().name(),
                                                      "\": its memory is the host's (device ", device(),
                                                      "; rank=", rank(), ")"));
  }
  SHARDD_RETURN_IF_ERROR(session_->UseStream(stream));
  has_cuda_stream_ = true;
  cuda_stream_ = stream;
  static std::atomic<bool> warned = false;
  if (const absl::Status fallback = session_->stream_fallback(); !fallback.ok() && !warned.exchange(true)) {
    const std::string text =
        absl::StrCat("shardd: job \"", spec().name(), "\" on ", device(), ": order is by the host, which waits for ",
                     "the stream in every call that gives memory back: ", fallback.message(), "\n");
    (void)fputs(text.c_str(), stderr);
  }
  return absl::OkStatus();
}

absl::Status ClientJob::ClearCudaStream() {
  SHARDD_RETURN_IF_ERROR(Live());
  SHARDD_RETURN_IF_ERROR(WaitPassBegun("clear_cuda_stream", nullptr));
  has_cuda_stream_ = false;
  cuda_stream_ = nullptr;
  session_->ForgetStream();
  progress_.awaited_version = 0;  // the host has not waited for it
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> ClientJob::GiveBack(const WaitFor& reason) {
  absl::StatusOr<uint64_t> done = session_->SignalDone(reason);
  SHARDD_RETURN_IF_ERROR(Note(done.status()));
  return done;
}

}  // namespace shardd
