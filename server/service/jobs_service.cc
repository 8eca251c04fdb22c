#include "server/service/jobs_service.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/grpc_status.h"
#include "server/observe/events.h"
#include "server/service/answer.h"

namespace shardd {
namespace {

constexpr int kDefaultEvents = 100;

}  // namespace

absl::StatusOr<Caller> JobsService::Identify(const grpc::CallbackServerContext& context) const {
  absl::StatusOr<PeerCredentials> peer = peers_->Lookup(context.peer());
  if (!peer.ok()) {
    return peer.status();
  }
  return Caller{peer->uid, peer->uid == 0 || peer->uid == admin_uid_};
}

template <typename Response, typename Ask>
grpc::ServerUnaryReactor* JobsService::Serve(grpc::CallbackServerContext* context, Response* response, Ask ask) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const absl::StatusOr<Caller> caller = Identify(*context);
  if (caller.ok()) {
    ask(*caller, MakeDone(reactor, response));
  } else {
    reactor->Finish(ToGrpcStatus(caller.status()));
  }
  return reactor;
}

template <typename Response, typename Ask>
grpc::ServerUnaryReactor* JobsService::ServeJob(grpc::CallbackServerContext* context, absl::string_view operation,
                                                const v1::JobRef& request, Response* response, Ask ask) {
  if (request.job().empty()) {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(ToGrpcStatus(
        absl::InvalidArgumentError(absl::StrCat(operation, ": field \"job\" is empty; give the job's name"))));
    return reactor;
  }
  return Serve(context, response, [&request, &ask](const Caller& caller, JobsSource::Done<Response> done) {
    ask(caller, request.job(), std::move(done));
  });
}

grpc::ServerUnaryReactor* JobsService::GetDaemon(grpc::CallbackServerContext* context, const v1::GetDaemonRequest*,
                                                 v1::Daemon* response) {
  return Serve(context, response, [this](const Caller& caller, JobsSource::Done<v1::Daemon> done) {
    source_->GetDaemon(caller, std::move(done));
  });
}

grpc::ServerUnaryReactor* JobsService::ListJobs(grpc::CallbackServerContext* context, const v1::ListJobsRequest*,
                                                v1::ListJobsResponse* response) {
  return Serve(context, response, [this](const Caller& caller, JobsSource::Done<v1::ListJobsResponse> done) {
    source_->ListJobs(caller, std::move(done));
  });
}

grpc::ServerUnaryReactor* JobsService::ListRanks(grpc::CallbackServerContext* context, const v1::JobRef* request,
                                                 v1::ListRanksResponse* response) {
  return ServeJob(context, "list ranks", *request, response, [this](const Caller& caller, const auto& job, auto done) {
    source_->ListRanks(caller, job, std::move(done));
  });
}

grpc::ServerUnaryReactor* JobsService::ListGroups(grpc::CallbackServerContext* context, const v1::JobRef* request,
                                                  v1::ListGroupsResponse* response) {
  return ServeJob(context, "list groups", *request, response, [this](const Caller& caller, const auto& job, auto done) {
    source_->ListGroups(caller, job, std::move(done));
  });
}

grpc::ServerUnaryReactor* JobsService::ListParameters(grpc::CallbackServerContext* context, const v1::JobRef* request,
                                                      v1::ListParametersResponse* response) {
  return ServeJob(context, "list parameters", *request, response,
                  [this](const Caller& caller, const auto& job, auto done) {
                    source_->ListParameters(caller, job, std::move(done));
                  });
}

grpc::ServerUnaryReactor* JobsService::ListStreams(grpc::CallbackServerContext* context, const v1::ListStreamsRequest*,
                                                   v1::ListStreamsResponse* response) {
  return Serve(context, response, [this](const Caller& caller, JobsSource::Done<v1::ListStreamsResponse> done) {
    source_->ListStreams(caller, std::move(done));
  });
}

grpc::ServerUnaryReactor* JobsService::GetMemory(grpc::CallbackServerContext* context, const v1::JobRef* request,
                                                 v1::Memory* response) {
  return ServeJob(context, "get memory", *request, response, [this](const Caller& caller, const auto& job, auto done) {
    source_->GetMemory(caller, job, std::move(done));
  });
}

grpc::ServerUnaryReactor* JobsService::ListEvents(grpc::CallbackServerContext* context,
                                                  const v1::ListEventsRequest* request,
                                                  v1::ListEventsResponse* response) {
  if (request->limit() < 0) {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(ToGrpcStatus(absl::InvalidArgumentError(
        absl::StrCat("list events: limit is negative (got ", request->limit(), ", want 0 or more)"))));
    return reactor;
  }
  const int limit =
      request->limit() == 0 ? kDefaultEvents : std::min<int>(request->limit(), static_cast<int>(EventLog::kCapacity));
  return Serve(context, response,
               [this, request, limit](const Caller& caller, JobsSource::Done<v1::ListEventsResponse> done) {
                 source_->ListEvents(caller, request->job(), limit, std::move(done));
               });
}

grpc::ServerUnaryReactor* JobsService::CloseJobByName(grpc::CallbackServerContext* context, const v1::JobRef* request,
                                                      v1::CloseJobByNameResponse* response) {
  return ServeJob(context, "close job", *request, response, [this](const Caller& caller, const auto& job, auto done) {
    source_->CloseJobByName(caller, job, std::move(done));
  });
}

}  // namespace shardd
