#ifndef SHARDD_SERVER_SERVICE_TRAINER_SERVICE_H_
#define SHARDD_SERVER_SERVICE_TRAINER_SERVICE_H_

#include "server/job/core.h"
#include "server/service/peer_registry.h"
#include "shardd/v1/trainer.grpc.pb.h"

namespace shardd {

// shardd.v1.TrainerService over the core: finds out who calls, hands on, answers. Thread-safe. Callers that did not
// come through the listener's Unix socket are refused: without SO_PEERCRED there is no owner for a job.
class TrainerService final : public v1::TrainerService::CallbackService {
 public:
  // Both outlive the server.
  TrainerService(Core* core, const PeerRegistry* peers) : core_(core), peers_(peers) {}

  grpc::ServerUnaryReactor* OpenJob(grpc::CallbackServerContext* context, const v1::OpenJobRequest* request,
                                    v1::OpenJobResponse* response) override;
  grpc::ServerUnaryReactor* AttachRank(grpc::CallbackServerContext* context, const v1::AttachRankRequest* request,
                                       v1::AttachRankResponse* response) override;
  grpc::ServerUnaryReactor* CloseJob(grpc::CallbackServerContext* context, const v1::CloseJobRequest* request,
                                     v1::CloseJobResponse* response) override;
  grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionEvent>* Session(grpc::CallbackServerContext* context) override;

 private:
  Core* const core_;
  const PeerRegistry* const peers_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_SERVICE_TRAINER_SERVICE_H_
