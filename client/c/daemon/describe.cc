#include "client/c/daemon/describe.h"

#include <google/protobuf/util/json_util.h>

#include <memory>

#include "absl/strings/str_cat.h"
#include "client/c/daemon/unary_call.h"
#include "common/status/status_macros.h"
#include "shardd/v1/jobs.grpc.pb.h"

namespace shardd {
namespace {

absl::StatusOr<std::string> ToJson(absl::string_view what, const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions print;
  print.always_print_primitive_fields = true;
  print.preserve_proto_field_names = true;
  std::string json;
  if (!google::protobuf::util::MessageToJsonString(message, &json, print).ok()) {
    return absl::InternalError(absl::StrCat("describe ", what, ": cannot be written as JSON"));
  }
  return json;
}

}  // namespace

absl::StatusOr<std::string> DescribeDaemonJson(absl::string_view address, absl::Duration timeout) {
  const Interrupt interrupt;
  SHARDD_ASSIGN_OR_RETURN(const Target target, GivenTarget(address));
  SHARDD_ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel, Connect(target, interrupt));
  auto stub = v1::JobsService::NewStub(channel);
  v1::Daemon daemon;
  SHARDD_RETURN_IF_ERROR(AsUnavailable(UnaryCall("describe_daemon", stub.get(), &v1::JobsService::Stub::AsyncGetDaemon,
                                                 v1::GetDaemonRequest(), Deadline::In(timeout), interrupt, &daemon)));
  return ToJson("daemon", daemon);
}

absl::StatusOr<v1::Job> DescribeJob(const Target& target, const std::string& name, uint64_t job_id,
                                    const std::string& job_secret, absl::Duration timeout, const Interrupt& interrupt) {
  SHARDD_ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel, Connect(target, interrupt));
  auto stub = v1::JobsService::NewStub(channel);
  v1::ListJobsResponse response;
  SHARDD_RETURN_IF_ERROR(
      AsUnavailable(UnaryCall("describe_job", stub.get(), &v1::JobsService::Stub::AsyncListJobs, v1::ListJobsRequest(),
                              Deadline::In(timeout), interrupt, &response, job_secret)));
  for (const v1::Job& job : response.jobs()) {
    if (job.job_id() == job_id && job.name() == name) {
      return job;
    }
  }
  return absl::NotFoundError(absl::StrCat("describe job \"", name, "\": the daemon does not have it"));
}

absl::StatusOr<std::string> DescribeJobJson(const Target& target, const std::string& name, uint64_t job_id,
                                            const std::string& job_secret, absl::Duration timeout,
                                            const Interrupt& interrupt) {
  SHARDD_ASSIGN_OR_RETURN(const v1::Job job, DescribeJob(target, name, job_id, job_secret, timeout, interrupt));
  return ToJson(absl::StrCat("job \"", name, "\""), job);
}

}  // namespace shardd
