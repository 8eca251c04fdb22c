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

}  // namespace

MetricsSource::MetricsSource(const std::string& socket) : jobs_(v1::JobsService::NewStub(ChannelTo(socket))) {}

absl::StatusOr<v1::GetMetricsResponse> MetricsSource::Get(absl::Duration limit) const {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(limit));
  v1::GetMetricsResponse response;
  const grpc::Status status = jobs_->GetMetrics(&context, v1::GetMetricsRequest(), &response);
  if (!status.ok()) return FromGrpcStatus(status);
  return response;
}

}  // namespace shardd
