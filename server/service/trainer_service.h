#ifndef SHARDD_SERVER_SERVICE_TRAINER_SERVICE_H_
#define SHARDD_SERVER_SERVICE_TRAINER_SERVICE_H_

#include <memory>

#include "server/daemon/core.h"
#include "server/loop/core_loop.h"
#include "server/service/message.h"
#include "server/service/peer_registry.h"
#include "shardd/v1/trainer.grpc.pb.h"

namespace shardd {

// Every method gets its requests as bytes (message.h).
using RawTrainerService = v1::TrainerService::WithRawCallbackMethod_OpenJob<
    v1::TrainerService::WithRawCallbackMethod_AttachRank<v1::TrainerService::WithRawCallbackMethod_Session<
        v1::TrainerService::WithRawCallbackMethod_ExtendJob<v1::TrainerService::WithRawCallbackMethod_OthersGradients<
            v1::TrainerService::WithRawCallbackMethod_CloseJob<v1::TrainerService::Service>>>>>>;

// shardd.v1.TrainerService over the core: identifies the caller, passes the call on, answers. Thread-safe. Refuses
// callers that did not come through the listener's Unix socket: without SO_PEERCRED a job has no owner.
class TrainerService final : public RawTrainerService {
 public:
  // Both must outlive the server.
  TrainerService(Core* core, const PeerRegistry* peers);

  grpc::ServerUnaryReactor* OpenJob(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ExtendJob(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                      grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* AttachRank(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* OthersGradients(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                            grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* CloseJob(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Session(grpc::CallbackServerContext* context) override;

 private:
  Core* const core_;
  const PeerRegistry* const peers_;
  const std::shared_ptr<DecodedMemory> decoded_;
  const std::unique_ptr<CoreLoop> ends_;  // of sessions
};

}  // namespace shardd

#endif  // SHARDD_SERVER_SERVICE_TRAINER_SERVICE_H_
