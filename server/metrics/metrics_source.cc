#include "server/metrics/metrics_source.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/grpc_status.h"
#include "grpcpp/grpcpp.h"

namespace shardd {
namespace {

// A daemon that was started anew is found within this time.
constexpr int kReconnectMs = 500;
// 64 jobs of hundreds of ranks and groups.
constexpr int kMaxMessageBytes = 64 << 20;

std::shared_ptr<grpc::Channel> ChannelTo(const std::string& socket) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kReconnectMs);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kReconnectMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kReconnectMs);
  return grpc::CreateCustomChannel(absl::StrCat("unix:", socket), grpc::InsecureChannelCredentials(), arguments);
}

using Stub = v1::JobsService::Stub;

template <typename Response, typename Request>
absl::StatusOr<Response> Call(Stub& stub, grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                              const Request& request, absl::Duration limit) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(limit));
  Response response;
  const grpc::Status status = (stub.*method)(&context, request, &response);
  if (!status.ok()) return FromGrpcStatus(status);
  return response;
}

}  // namespace

MetricsSource::MetricsSource(const std::string& socket) : jobs_(v1::JobsService::NewStub(ChannelTo(socket))) {}

absl::StatusOr<v1::GetMetricsResponse> MetricsSource::Get(absl::Duration limit) const {
  return Call<v1::GetMetricsResponse>(*jobs_, &Stub::GetMetrics, v1::GetMetricsRequest(), limit);
}
absl::StatusOr<v1::ListJobsResponse> MetricsSource::Jobs(absl::Duration limit) const {
  return Call<v1::ListJobsResponse>(*jobs_, &Stub::ListJobs, v1::ListJobsRequest(), limit);
}
absl::StatusOr<v1::ListRanksResponse> MetricsSource::Ranks(const v1::JobRef& job, absl::Duration limit) const {
  return Call<v1::ListRanksResponse>(*jobs_, &Stub::ListRanks, job, limit);
}
absl::StatusOr<v1::ListEventsResponse> MetricsSource::Events(const v1::ListEventsRequest& which,
                                                             absl::Duration limit) const {
  return Call<v1::ListEventsResponse>(*jobs_, &Stub::ListEvents, which, limit);
}
absl::StatusOr<v1::ListHistoryResponse> MetricsSource::History(const v1::ListHistoryRequest& which,
                                                               absl::Duration limit) const {
  return Call<v1::ListHistoryResponse>(*jobs_, &Stub::ListHistory, which, limit);
}

}  // namespace shardd
