// More to train: the ranks ask together, and another job takes this one's place.

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/c/client_job.h"
#include "client/c/connect.h"
#include "client/c/unary_call.h"
#include "common/status/status_macros.h"
#include "shardd/v1/trainer.grpc.pb.h"

namespace shardd {

absl::StatusOr<bool> ClientJob::Extend(v1::JobSpec spec) {
  SHARDD_RETURN_IF_ERROR(Live());
  if (spec.name() != options_.spec.name()) {
    return absl::InvalidArgumentError(absl::StrCat("extend_job \"", options_.spec.name(),
                                                   "\": the spec is of another job (got \"", spec.name(), "\")"));
  }
  SHARDD_RETURN_IF_ERROR(WaitCommitted("extend_job", nullptr));
  // What was stored into shards comes along, and is not copied before it is there.
  if (pass_copies() && !session_->DrainStreams(/*release=*/false, options_.timeout)) {
    SHARDD_RETURN_IF_ERROR(interrupt_.Check("extend_job"));
    return absl::DeadlineExceededError(absl::StrCat("extend_job \"", options_.spec.name(),
                                                    "\": the program's stream has not ended what it had within ",
                                                    absl::FormatDuration(options_.timeout), " (rank=", rank(), ")"));
  }
  // The ring and a call are two ways to the daemon: what was sent on the first must not be overtaken.
  session_->Wake();
  SHARDD_RETURN_IF_ERROR(
      Note(session_->WaitConsumed(session_->submitted(), {"extend_job", nullptr, "the commands before it"})));
  SHARDD_ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel, Connect(target_, interrupt_));
  auto stub = v1::TrainerService::NewStub(channel);
  v1::ExtendJobRequest request;
  request.set_session_id(session_->id());
  request.set_token(session_->token());
  *request.mutable_spec() = std::move(spec);
  v1::ExtendJobResponse response;
  const absl::Status status = UnaryCall("extend_job", stub.get(), &v1::TrainerService::Stub::AsyncExtendJob, request,
                                        absl::Now() + options_.timeout, interrupt_, &response);
  if (status.ok()) {
    return response.extended();
  }
  // What ended the session says more than that the call has failed.
  SHARDD_RETURN_IF_ERROR(Live());
  return status;
}

}  // namespace shardd
