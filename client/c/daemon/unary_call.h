#ifndef SHARDD_CLIENT_C_DAEMON_UNARY_CALL_H_
#define SHARDD_CLIENT_C_DAEMON_UNARY_CALL_H_

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/c/host/interrupt.h"
#include "common/clock/deadline.h"
#include "common/secret/job_secret.h"
#include "common/status/grpc_status.h"
#include "grpc/support/time.h"
#include "grpcpp/grpcpp.h"

namespace shardd {

// Whether the daemon has ended the call because it ends itself: nobody here has cancelled it.
inline bool IsShuttingDown(const absl::Status& status) {
  return absl::IsCancelled(status) && !Interrupt::Ended(status);
}
// As what it is for a caller that does not try again: CANCELLED is the host's.
inline absl::Status AsUnavailable(absl::Status status) {
  return IsShuttingDown(status) ? absl::UnavailableError(status.message()) : std::move(status);
}

// As gRPC takes it: on the steady clock, so that it asks no other.
inline gpr_timespec ForGrpc(Deadline deadline) {
  const absl::Duration left = deadline.Left();
  return left == absl::InfiniteDuration()
             ? gpr_inf_future(GPR_CLOCK_MONOTONIC)
             : gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                            gpr_time_from_nanos(absl::ToInt64Nanoseconds(left), GPR_TIMESPAN));
}

// One unary call that the host can interrupt: gRPC's synchronous calls return at the deadline only. `method` is the
// stub's Async one. Blocks until the answer, the deadline or CANCELLED, "<name>: interrupted"; what the daemon makes of
// a call that was cancelled is not known then. `job_secret` goes along as metadata; empty: none.
template <typename Stub, typename Request, typename Response>
absl::Status UnaryCall(const char* name, Stub* stub,
                       std::unique_ptr<grpc::ClientAsyncResponseReader<Response>> (Stub::*method)(
                           grpc::ClientContext*, const Request&, grpc::CompletionQueue*),
                       const Request& request, Deadline deadline, const Interrupt& interrupt, Response* response,
                       const std::string& job_secret = "") {
  grpc::ClientContext context;
  if (!job_secret.empty()) {
    context.AddMetadata(kJobSecretMetadata, job_secret);
  }
  context.set_deadline(ForGrpc(deadline));
  grpc::CompletionQueue queue;
  grpc::Status status;
  const auto reader = (stub->*method)(&context, request, &queue);
  reader->Finish(response, &status, nullptr);
  bool interrupted = false;
  bool late = false;
  void* tag = nullptr;
  bool ok = false;
  while (queue.AsyncNext(&tag, &ok, ForGrpc(Deadline::In(Interrupt::kSlice))) == grpc::CompletionQueue::TIMEOUT) {
    if (!interrupted && interrupt.Raised()) {
      interrupted = true;
      context.TryCancel();
    } else if (!late && deadline.HasPassed()) {  // gRPC's own timers are late where the clock was set back
      late = true;
      context.TryCancel();
    }
  }
  queue.Shutdown();
  while (queue.Next(&tag, &ok)) {
  }
  if (interrupted) return Interrupt::Cancelled(name);
  if (late && status.error_code() == grpc::StatusCode::CANCELLED) {
    return absl::DeadlineExceededError("Deadline Exceeded");  // as gRPC says it
  }
  constexpr absl::string_view kShuttingDown = "the daemon is shutting down";
  if (status.error_code() == grpc::StatusCode::CANCELLED && !absl::StrContains(status.error_message(), kShuttingDown)) {
    // Nobody here has cancelled it. A server that ends does so to its calls.
    return absl::CancelledError(absl::StrCat(name, ": ", kShuttingDown, " (", status.error_message(), ")"));
  }
  return FromGrpcStatus(status);
}

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_DAEMON_UNARY_CALL_H_
