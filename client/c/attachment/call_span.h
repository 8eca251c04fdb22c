#ifndef SHARDD_CLIENT_C_ATTACHMENT_CALL_SPAN_H_
#define SHARDD_CLIENT_C_ATTACHMENT_CALL_SPAN_H_

#include <cstdint>

#include "client/c/attachment/attachment.h"
#include "common/shm/trace_ring.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

// Measures a call of the library from here to the end of its scope, where the job is traced; else it costs a load.
// Spans of a rank follow each other: only what a trainer calls has one, nothing that such a call calls. A call has
// failed unless it returns through Of().
class CallSpan {
 public:
  // `attachment` outlives the span. `steps_ago`: the call is of a step that was sent before.
  CallSpan(const Attachment& attachment, v1::TraceCall call, int group = -1, int64_t steps_ago = 0)
      : trace_(attachment.session().trace().tracing() ? &attachment.session().trace() : nullptr) {
    if (trace_ != nullptr) {
      record_ = {TraceNowNs(),
                 0,
                 attachment.ledger().running_step() - steps_ago,
                 group,
                 static_cast<uint16_t>(call | kTraceCallFailed),
                 0};
    }
  }
  ~CallSpan() {
    if (trace_ != nullptr) {
      record_.end_ns = TraceNowNs();
      trace_->Write(record_);
    }
  }
  // The call's result, absl::Status or StatusOr, as it is.
  template <typename Result>
  Result Of(Result result) {
    if (trace_ != nullptr && result.ok()) {
      record_.call = static_cast<uint16_t>(record_.call & ~kTraceCallFailed);
    }
    return result;
  }
  CallSpan(const CallSpan&) = delete;
  CallSpan& operator=(const CallSpan&) = delete;

 private:
  TraceWriter* const trace_;
  TraceRecord record_;  // set where trace_ is
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_ATTACHMENT_CALL_SPAN_H_
