#ifndef SHARDD_SERVER_SERVICE_JOBS_SERVICE_H_
#define SHARDD_SERVER_SERVICE_JOBS_SERVICE_H_

#include <memory>

#include "grpcpp/grpcpp.h"
#include "server/daemon/jobs_source.h"
#include "server/handover/handover.h"
#include "server/history/history.h"
#include "server/service/fd_reply.h"
#include "server/service/peer_registry.h"
#include "shardd/v1/jobs.grpc.pb.h"

namespace shardd {

// Every method gets its request as bytes (message.h).
using RawJobsService = v1::JobsService::WithRawCallbackMethod_GetDaemon<v1::JobsService::WithRawCallbackMethod_ListJobs<
    v1::JobsService::WithRawCallbackMethod_ListRanks<v1::JobsService::WithRawCallbackMethod_ListGroups<
        v1::JobsService::WithRawCallbackMethod_ListParameters<v1::JobsService::WithRawCallbackMethod_ListStreams<
            v1::JobsService::WithRawCallbackMethod_GetMemory<v1::JobsService::WithRawCallbackMethod_ListEvents<
                v1::JobsService::WithRawCallbackMethod_CloseJobByName<v1::JobsService::WithRawCallbackMethod_TraceJob<
                    v1::JobsService::WithRawCallbackMethod_HandOver<v1::JobsService::WithRawCallbackMethod_GetMetrics<
                        v1::JobsService::WithRawCallbackMethod_ListHistory<v1::JobsService::Service>>>>>>>>>>>>>;

// The operator's rpcs over gRPC: identifies the caller, checks the request, asks the source, encodes. Its only state is
// the number of calls and traces under way. Thread-safe; no call blocks a gRPC thread.
class JobsService final : public RawJobsService {
 public:
  // Limits of traces for one uid and for all, because each may have 4 MiB of spans waiting for its reader. The limit
  // for all is 2 * kMaxTracesPerUid higher for root and the daemon's uid, so that they always find room.
  static constexpr size_t kMaxTracesPerUid = 8;
  static constexpr size_t kMaxTraces = 48;
  // Limits of unfinished calls for one uid and for all, because an answer grows with the model and waits in the
  // daemon's memory for its reader. The limit for all is 2 * kMaxCallsPerUid higher for root and the daemon's uid.
  static constexpr size_t kMaxCallsPerUid = 64;
  static constexpr size_t kMaxCalls = 256;

  // All must outlive the server. `admin_uid` (the daemon's own) and root see all jobs, from the daemon's own
  // namespaces.
  // `history` null: the daemon keeps none.
  JobsService(JobsSource* source, const PeerRegistry* peers, uint32_t admin_uid, Handover* handover,
              History* history = nullptr)
      : source_(source), peers_(peers), admin_uid_(admin_uid), handover_(handover), history_(history) {}

  grpc::ServerUnaryReactor* GetDaemon(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                      grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ListJobs(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ListRanks(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                      grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ListGroups(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ListParameters(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                           grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ListStreams(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                        grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* GetMetrics(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* GetMemory(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                      grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ListEvents(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ListHistory(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                        grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* CloseJobByName(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                           grpc::ByteBuffer* response) override;
  grpc::ServerWriteReactor<grpc::ByteBuffer>* TraceJob(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* request) override;
  grpc::ServerUnaryReactor* HandOver(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;

 private:
  absl::StatusOr<Caller> Identify(const grpc::CallbackServerContext& context) const;
  // Makes the reactor of a call; runs ask(caller, request, done) if caller and request are valid.
  template <typename Request, typename Response, typename Ask>
  grpc::ServerUnaryReactor* Serve(grpc::CallbackServerContext* context, absl::string_view operation,
                                  const grpc::ByteBuffer& request, grpc::ByteBuffer* response, Ask ask);

  JobsSource* const source_;
  const PeerRegistry* const peers_;
  const uint32_t admin_uid_;
  Handover* const handover_;
  History* const history_;
  const std::shared_ptr<PendingCount> calls_ = std::make_shared<PendingCount>();
  const std::shared_ptr<PendingCount> traces_ = std::make_shared<PendingCount>();
};

}  // namespace shardd

#endif  // SHARDD_SERVER_SERVICE_JOBS_SERVICE_H_
