#ifndef SHARDD_CLIENT_C_DAEMON_UNARY_CALL_H_
#define SHARDD_CLIENT_C_DAEMON_UNARY_CALL_H_

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/c/host/interrupt.h"
#include "common/secret/job_secret.h"
#include "common/status/grpc_status.h"
#include "grpcpp/grpcpp.h"

namespace shardd {

// One unary call that the host can interrupt: gRPC's synchronous calls return at the deadline only. `method` is the
// stub's Async one. Blocks until the answer, the deadline or CANCELLED, "<name>: interrupted"; what the daemon makes of
// a call that was cancelled is not known then. `job_secret` goes along as metadata; empty: none.
template <typename Stub, typename Request, typename Response>
absl::Status UnaryCall(const char* name, Stub* stub,
                       std::unique_ptr<grpc::ClientAsyncResponseReader<Response>> (Stub::*method)(
                           grpc::ClientContext*, const Request&, grpc::CompletionQueue*),
                       const Request& request, absl::Time deadline, const Interrupt& interrupt, Response* response,
                       const std::string& job_secret = "") {
  grpc::ClientContext context;
  if (!job_secret.empty()) {
    context.AddMetadata(kJobSecretMetadata, job_secret);
  }
  context.set_deadline(absl::ToChronoTime(deadline));
  grpc::CompletionQueue queue;
  grpc::Status status;
  const auto reader = (stub->*method)(&context, request, &queue);
  reader->Finish(response, &status, nullptr);
  bool interrupted = false;
  void* tag = nullptr;
  bool ok = false;
  while (queue.AsyncNext(&tag, &ok, absl::ToChronoTime(absl::Now() + Interrupt::kSlice)) ==
         grpc::CompletionQueue::TIMEOUT) {
    if (!interrupted && interrupt.Raised()) {
      interrupted = true;
      context.TryCancel();
    }
  }
  queue.Shutdown();
  while (queue.Next(&tag, &ok)) {
  }
  if (interrupted) return Interrupt::Cancelled(name);
  constexpr absl::string_view kShuttingDown = "the daemon is shutting down";
  if (status.error_code() == grpc::StatusCode::CANCELLED && !absl::StrContains(status.error_message(), kShuttingDown)) {
    // Nobody here has cancelled it. A server that ends does so to its calls.
    return absl::CancelledError(absl::StrCat(name, ": ", kShuttingDown, " (", status.error_message(), ")"));
  }
  return FromGrpcStatus(status);
}

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_DAEMON_UNARY_CALL_H_
