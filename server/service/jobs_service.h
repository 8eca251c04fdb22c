#ifndef SHARDD_SERVER_SERVICE_JOBS_SERVICE_H_
#define SHARDD_SERVER_SERVICE_JOBS_SERVICE_H_

#include "grpcpp/grpcpp.h"
#include "server/service/jobs_source.h"
#include "server/service/peer_registry.h"
#include "shardd/v1/jobs.grpc.pb.h"

namespace shardd {

// The operator's rpcs over gRPC: identifies the caller, checks the request, asks the source, encodes. Holds no state.
// Thread-safe; no call blocks a gRPC thread.
class JobsService final : public v1::JobsService::CallbackService {
 public:
  // Both must outlive the server that serves this. `admin_uid` (the daemon's own) and root see the jobs of all.
  JobsService(JobsSource* source, const PeerRegistry* peers, uint32_t admin_uid)
      : source_(source), peers_(peers), admin_uid_(admin_uid) {}

  grpc::ServerUnaryReactor* GetDaemon(grpc::CallbackServerContext* context, const v1::GetDaemonRequest* request,
                                      v1::Daemon* response) override;
  grpc::ServerUnaryReactor* ListJobs(grpc::CallbackServerContext* context, const v1::ListJobsRequest* request,
                                     v1::ListJobsResponse* response) override;
  grpc::ServerUnaryReactor* ListRanks(grpc::CallbackServerContext* context, const v1::JobRef* request,
                                      v1::ListRanksResponse* response) override;
  grpc::ServerUnaryReactor* ListGroups(grpc::CallbackServerContext* context, const v1::JobRef* request,
                                       v1::ListGroupsResponse* response) override;
  grpc::ServerUnaryReactor* ListParameters(grpc::CallbackServerContext* context, const v1::JobRef* request,
                                           v1::ListParametersResponse* response) override;
  grpc::ServerUnaryReactor* ListStreams(grpc::CallbackServerContext* context, const v1::ListStreamsRequest* request,
                                        v1::ListStreamsResponse* response) override;
  grpc::ServerUnaryReactor* GetMemory(grpc::CallbackServerContext* context, const v1::JobRef* request,
                                      v1::Memory* response) override;
  grpc::ServerUnaryReactor* ListEvents(grpc::CallbackServerContext* context, const v1::ListEventsRequest* request,
                                       v1::ListEventsResponse* response) override;
  grpc::ServerUnaryReactor* CloseJobByName(grpc::CallbackServerContext* context, const v1::JobRef* request,
                                           v1::CloseJobByNameResponse* response) override;

 private:
  absl::StatusOr<Caller> Identify(const grpc::CallbackServerContext& context) const;
  // The reactor of a call without a job, and of one whose job is checked first.
  template <typename Response, typename Ask>
  grpc::ServerUnaryReactor* Serve(grpc::CallbackServerContext* context, Response* response, Ask ask);
  template <typename Response, typename Ask>
  grpc::ServerUnaryReactor* ServeJob(grpc::CallbackServerContext* context, absl::string_view operation,
                                     const v1::JobRef& request, Response* response, Ask ask);

  JobsSource* const source_;
  const PeerRegistry* const peers_;
  const uint32_t admin_uid_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_SERVICE_JOBS_SERVICE_H_
