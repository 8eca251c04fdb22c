#include "client/c/job/program_stream.h"

#include <atomic>
#include <cstdio>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"

namespace shardd {

absl::Status SetCudaStream(Attachment& attachment, const Graphs& graphs, void* stream) {
  SHARDD_RETURN_IF_ERROR(attachment.Live());
  if (!attachment.memory().on_device()) {
    return absl::FailedPreconditionError(absl::StrCat("set_cuda_stream job \"", attachment.plan().job(),
                                                      "\": its memory is the host's (device ", attachment.device(),
                                                      "; rank=", attachment.rank(), ")"));
  }
  if (!attachment.IsNamed(stream)) {
    SHARDD_RETURN_IF_ERROR(graphs.CheckNotNoting("set_cuda_stream"));
  }
  SHARDD_RETURN_IF_ERROR(attachment.NameStream(stream));
  static std::atomic<bool> warned = false;
  if (const absl::Status fallback = attachment.session().stream_waits().fallback();
      !fallback.ok() && !warned.exchange(true)) {
    const std::string text =
        absl::StrCat("shardd: job \"", attachment.plan().job(), "\" on ", attachment.device(),
                     ": order is by the host, which waits for ",
                     "the stream in every call that gives memory back: ", fallback.message(), "\n");
    (void)fputs(text.c_str(), stderr);
  }
  return absl::OkStatus();
}

absl::Status ClearCudaStream(Attachment& attachment, const Graphs& graphs) {
  SHARDD_RETURN_IF_ERROR(attachment.Live());
  SHARDD_RETURN_IF_ERROR(graphs.CheckNotNoting("clear_cuda_stream"));
  SHARDD_RETURN_IF_ERROR(attachment.WaitPassBegun("clear_cuda_stream", nullptr));
  attachment.ForgetStream();
  return absl::OkStatus();
}

}  // namespace shardd
