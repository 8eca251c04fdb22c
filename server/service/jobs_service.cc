#include "server/service/jobs_service.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/grpc_status.h"
#include "server/observe/events.h"
#include "server/observe/trace_sink.h"
#include "server/service/answer.h"
#include "server/service/call_secret.h"
#include "server/service/trace_reactor.h"

namespace shardd {
namespace {

constexpr int kDefaultEvents = 100;
constexpr int kMaxTraceSteps = 1000;
constexpr int64_t kMaxTraceMs = 600'000;

absl::Status Check(absl::string_view operation, const v1::JobRef& ref) {
  return ref.job().empty()
             ? absl::InvalidArgumentError(absl::StrCat(operation, ": field \"job\" is empty; give the job's name"))
             : absl::OkStatus();
}
absl::Status Check(absl::string_view operation, const v1::ListEventsRequest& request) {
  return request.limit() < 0 ? absl::InvalidArgumentError(absl::StrCat(operation, ": limit is negative (got ",
                                                                       request.limit(), ", want 0 or more)"))
                             : absl::OkStatus();
}
absl::Status Check(absl::string_view operation, const v1::ListHistoryRequest& request) {
  return request.limit() >= 0 && request.since_unix_ms() >= 0
             ? absl::OkStatus()
             : absl::InvalidArgumentError(absl::StrCat(operation, ": limit or since_unix_ms is negative (got ",
                                                       request.limit(), " and ", request.since_unix_ms(),
                                                       ", want 0 or more)"));
}
absl::Status Check(absl::string_view operation, const v1::TraceJobRequest& request) {
  const auto refuse = [&](absl::string_view field, int64_t got, int64_t most) {
    return absl::InvalidArgumentError(
        absl::StrCat(operation, ": ", field, " is out of range (got ", got, ", want 0 to ", most, ")"));
  };
  return request.job().empty()
             ? absl::InvalidArgumentError(absl::StrCat(operation, ": field \"job\" is empty; give the job's name"))
         : request.steps() < 0 || request.steps() > kMaxTraceSteps ? refuse("steps", request.steps(), kMaxTraceSteps)
         : request.timeout_ms() < 0 || request.timeout_ms() > kMaxTraceMs
             ? refuse("timeout_ms", request.timeout_ms(), kMaxTraceMs)
             : absl::OkStatus();
}
absl::Status Check(absl::string_view, const google::protobuf::Message&) { return absl::OkStatus(); }

// The reactor of one call, which counts for its caller until gRPC is done with it.
class CountedReactor final : public grpc::ServerUnaryReactor {
 public:
  void Hold(PendingSlot slot) { slot_.emplace(std::move(slot)); }
  void OnDone() override { delete this; }

 private:
  std::optional<PendingSlot> slot_;
};

}  // namespace

absl::StatusOr<Caller> JobsService::Identify(const grpc::CallbackServerContext& context) const {
  absl::StatusOr<PeerCredentials> peer = peers_->Lookup(context.peer());
  if (!peer.ok()) {
    return peer.status();
  }
  const absl::StatusOr<JobSecret> secret = SecretOf(context);
  if (!secret.ok()) {
    return secret.status();
  }
  const bool has_uid = peer->uid == 0 || peer->uid == admin_uid_;
  return Caller{
      {peer->uid, secret->digest()}, has_uid && peers_->MayAdminister(context.peer()), peers_->MayView(context.peer())};
}

template <typename Request, typename Response, typename Ask>
grpc::ServerUnaryReactor* JobsService::Serve(grpc::CallbackServerContext* context, absl::string_view operation,
                                             const grpc::ByteBuffer& bytes, grpc::ByteBuffer* response, Ask ask) {
  auto* reactor = new CountedReactor();
  const absl::StatusOr<Caller> caller = Identify(*context);
  Request request;
  absl::Status status = caller.status();
  status.Update(DecodeWithin(operation, bytes, kSmallMessage, &request));
  status.Update(Check(operation, request));
  if (status.ok()) {
    const size_t total = caller->is_admin ? kMaxCalls + 2 * kMaxCallsPerUid : kMaxCalls;
    if (calls_->TryAcquire(caller->tenant.uid, kMaxCallsPerUid, total)) {
      reactor->Hold(PendingSlot(calls_, caller->tenant.uid));
    } else {
      status = absl::ResourceExhaustedError(
          absl::StrCat(operation, ": too many calls are under way or not read (want less than ", kMaxCallsPerUid,
                       " of uid ", caller->tenant.uid, " and ", total, " of all); wait for the answer of one"));
    }
  }
  if (status.ok()) {
    ask(*caller, request, MakeDone<Response>(reactor, response));
  } else {
    reactor->Finish(ToGrpcStatus(status));
  }
  return reactor;
}

grpc::ServerUnaryReactor* JobsService::GetDaemon(grpc::CallbackServerContext* context, const grpc::ByteBuffer* bytes,
                                                 grpc::ByteBuffer* response) {
  return Serve<v1::GetDaemonRequest, v1::Daemon>(
      context, "get daemon", *bytes, response, [this](const Caller& caller, const auto&, auto done) {
        source_->GetDaemon(caller, [this, done = std::move(done)](absl::StatusOr<v1::Daemon> daemon) {
          if (daemon.ok()) daemon->set_handover(handover_->state());
          done(std::move(daemon));
        });
      });
}

grpc::ServerUnaryReactor* JobsService::ListJobs(grpc::CallbackServerContext* context, const grpc::ByteBuffer* bytes,
                                                grpc::ByteBuffer* response) {
  return Serve<v1::ListJobsRequest, v1::ListJobsResponse>(
      context, "list jobs", *bytes, response,
      [this](const Caller& caller, const auto&, auto done) { source_->ListJobs(caller, std::move(done)); });
}

grpc::ServerUnaryReactor* JobsService::ListRanks(grpc::CallbackServerContext* context, const grpc::ByteBuffer* bytes,
                                                 grpc::ByteBuffer* response) {
  return Serve<v1::JobRef, v1::ListRanksResponse>(
      context, "list ranks", *bytes, response,
      [this](const Caller& caller, const auto& ref, auto done) { source_->ListRanks(caller, ref, std::move(done)); });
}

grpc::ServerUnaryReactor* JobsService::ListGroups(grpc::CallbackServerContext* context, const grpc::ByteBuffer* bytes,
                                                  grpc::ByteBuffer* response) {
  return Serve<v1::JobRef, v1::ListGroupsResponse>(
      context, "list groups", *bytes, response,
      [this](const Caller& caller, const auto& ref, auto done) { source_->ListGroups(caller, ref, std::move(done)); });
}

grpc::ServerUnaryReactor* JobsService::ListParameters(grpc::CallbackServerContext* context,
                                                      const grpc::ByteBuffer* bytes, grpc::ByteBuffer* response) {
  return Serve<v1::JobRef, v1::ListParametersResponse>(context, "list parameters", *bytes, response,
                                                       [this](const Caller& caller, const auto& ref, auto done) {
                                                         source_->ListParameters(caller, ref, std::move(done));
                                                       });
}

grpc::ServerUnaryReactor* JobsService::ListStreams(grpc::CallbackServerContext* context, const grpc::ByteBuffer* bytes,
                                                   grpc::ByteBuffer* response) {
  return Serve<v1::ListStreamsRequest, v1::ListStreamsResponse>(
      context, "list streams", *bytes, response,
      [this](const Caller& caller, const auto&, auto done) { source_->ListStreams(caller, std::move(done)); });
}

grpc::ServerUnaryReactor* JobsService::GetMetrics(grpc::CallbackServerContext* context, const grpc::ByteBuffer* bytes,
                                                  grpc::ByteBuffer* response) {
  return Serve<v1::GetMetricsRequest, v1::GetMetricsResponse>(
      context, "get metrics", *bytes, response,
      [this](const Caller& caller, const auto&, auto done) { source_->GetMetrics(caller, std::move(done)); });
}

grpc::ServerUnaryReactor* JobsService::GetMemory(grpc::CallbackServerContext* context, const grpc::ByteBuffer* bytes,
                                                 grpc::ByteBuffer* response) {
  return Serve<v1::JobRef, v1::Memory>(
      context, "get memory", *bytes, response,
      [this](const Caller& caller, const auto& ref, auto done) { source_->GetMemory(caller, ref, std::move(done)); });
}

grpc::ServerUnaryReactor* JobsService::ListEvents(grpc::CallbackServerContext* context, const grpc::ByteBuffer* bytes,
                                                  grpc::ByteBuffer* response) {
  return Serve<v1::ListEventsRequest, v1::ListEventsResponse>(
      context, "list events", *bytes, response, [this](const Caller& caller, const auto& request, auto done) {
        const int limit = request.limit() == 0 ? kDefaultEvents
                                               : std::min<int>(request.limit(), static_cast<int>(EventLog::kCapacity));
        v1::JobRef ref;
        ref.set_job(request.job());
        if (request.has_uid()) {
          ref.set_uid(request.uid());
        }
        source_->ListEvents(caller, ref, limit, std::move(done));
      });
}

grpc::ServerUnaryReactor* JobsService::ListHistory(grpc::CallbackServerContext* context, const grpc::ByteBuffer* bytes,
                                                   grpc::ByteBuffer* response) {
  return Serve<v1::ListHistoryRequest, v1::ListHistoryResponse>(
      context, "list history", *bytes, response, [this](const Caller& caller, const auto& request, auto done) {
        if (history_ == nullptr) {
          done(absl::FailedPreconditionError("list history: this daemon keeps none; start it with --history_dir"));
          return;
        }
        history_->List(request, caller.tenant.uid, caller.SeesAll(), std::move(done));
      });
}

grpc::ServerUnaryReactor* JobsService::CloseJobByName(grpc::CallbackServerContext* context,
                                                      const grpc::ByteBuffer* bytes, grpc::ByteBuffer* response) {
  return Serve<v1::JobRef, v1::CloseJobByNameResponse>(context, "close job", *bytes, response,
                                                       [this](const Caller& caller, const auto& ref, auto done) {
                                                         source_->CloseJobByName(caller, ref, std::move(done));
                                                       });
}

grpc::ServerUnaryReactor* JobsService::HandOver(grpc::CallbackServerContext* context, const grpc::ByteBuffer* bytes,
                                                grpc::ByteBuffer* response) {
  return Serve<v1::HandOverRequest, v1::HandOverResponse>(context, "hand over", *bytes, response,
                                                          [this](const Caller& caller, const auto& request, auto done) {
                                                            handover_->Ask(caller, request, std::move(done));
                                                          });
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* JobsService::TraceJob(grpc::CallbackServerContext* context,
                                                                  const grpc::ByteBuffer* bytes) {
  auto* reactor = new TraceReactor(context);
  std::shared_ptr<TraceSink> sink = reactor->sink();
  const absl::StatusOr<Caller> caller = Identify(*context);
  v1::TraceJobRequest request;
  absl::Status status = caller.status();
  status.Update(DecodeWithin("trace job", *bytes, kSmallMessage, &request));
  status.Update(Check("trace job", request));
  if (status.ok()) {
    const size_t total = caller->is_admin ? kMaxTraces + 2 * kMaxTracesPerUid : kMaxTraces;
    if (traces_->TryAcquire(caller->tenant.uid, kMaxTracesPerUid, total)) {
      reactor->Hold(PendingSlot(traces_, caller->tenant.uid));
    } else {
      status = absl::ResourceExhaustedError(
          absl::StrCat("trace job \"", request.job(), "\": too many traces are under way or not read (want less than ",
                       kMaxTracesPerUid, " of uid ", caller->tenant.uid, " and ", total, " of all); end one"));
    }
  }
  if (status.ok()) {
    source_->TraceJob(*caller, request, std::move(sink));
  } else {
    sink->Finish(std::move(status));
  }
  return reactor;
}

}  // namespace shardd
