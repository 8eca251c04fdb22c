// After an exception in user code between forward and the end of backward: this rank alone goes back, the session
// lives.

#include "absl/strings/str_cat.h"
#include "client/c/call_span.h"
#include "client/c/client_job.h"
#include "common/status/status_macros.h"

namespace shardd {

absl::Status ClientJob::AbandonBackward() {
  CallSpan span(this, session_.get(), v1::TRACE_CALL_ABANDON_BACKWARD);
  SHARDD_RETURN_IF_ERROR(Live());
  if (progress_.full_params != FullParams::kOutside) {
    return absl::FailedPreconditionError(absl::StrCat("abandon_backward job \"", spec().name(),
                                                      "\": full parameters are entered (rank=", rank(),
                                                      "); call shardd_leave_full_params first"));
  }
  SHARDD_RETURN_IF_ERROR(WaitPassBegun("abandon_backward", nullptr));
  const WaitFor reason{"abandon_backward", nullptr, "space in the command ring"};
  SHARDD_RETURN_IF_ERROR(Note(session_->WaitSpace(1, reason)));
  CommandRecord record = {};
  SHARDD_ASSIGN_OR_RETURN(record.done, GiveBack(reason));
  SHARDD_RETURN_IF_ERROR(ApplyToAll(HandleEvent::kAbandon));
  record.opcode = Opcode::kAbandonBackward;
  // At once: others may wait for what this rank holds, and what is not added up by then is taken back.
  SHARDD_RETURN_IF_ERROR(Note(session_->Send(record, /*act=*/true, reason)));
  progress_.backward_open = false;
  for (Slot& slot : progress_.slots) {
    slot.holder = -1;  // the gradients that were being written are of no use
    slot.told = false;
  }
  return span.Of(absl::OkStatus());
}

}  // namespace shardd
