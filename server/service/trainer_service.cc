#include "server/service/trainer_service.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "common/shm/open_files.h"
#include "common/status/grpc_status.h"
#include "common/status/status_macros.h"
#include "server/service/answer.h"
#include "server/service/call_secret.h"
#include "server/service/session_reactor.h"

namespace shardd {
namespace {

// A module tree of a million parameters takes about 300 MiB.
constexpr MessageLimits kJobMessage = {256 << 20, 512 << 20};
constexpr int64_t kMaxDecodedBytesPerUid = int64_t{2} << 30;

// The answer of a call that `begin` begins, or refuses with the status that it returns.
grpc::ServerUnaryReactor* AnswerCall(grpc::CallbackServerContext* context,
                                     absl::FunctionRef<absl::Status(grpc::ServerUnaryReactor*)> begin) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  if (absl::Status status = begin(reactor); !status.ok()) reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

// Keeps what is held until gRPC is done with the call, and with its answer.
class HoldingReactor final : public grpc::ServerUnaryReactor {
 public:
  const std::shared_ptr<std::shared_ptr<void>> held = std::make_shared<std::shared_ptr<void>>();
  void OnDone() override {
    held->reset();
    delete this;
  }
};

}  // namespace

TrainerService::TrainerService(Core* core, const PeerRegistry* peers)
    : core_(core),
      peers_(peers),
      decoded_(std::make_shared<DecodedMemory>(kMaxDecodedBytesPerUid)),
      ends_(CoreLoop::MakeQueue("session ends")) {}

grpc::ServerUnaryReactor* TrainerService::OpenJob(grpc::CallbackServerContext* context, const grpc::ByteBuffer* bytes,
                                                  grpc::ByteBuffer* response) {
  return AnswerCall(context, [&](grpc::ServerUnaryReactor* reactor) -> absl::Status {
    SHARDD_ASSIGN_OR_RETURN(const PeerCredentials peer, peers_->Lookup(context->peer()));
    SHARDD_ASSIGN_OR_RETURN(JobSecret secret, SecretOf(*context));
    SHARDD_RETURN_IF_ERROR(CheckOpenFiles("open job"));
    v1::OpenJobRequest request;
    SHARDD_ASSIGN_OR_RETURN(DecodedMemory::Hold hold,
                            DecodeFor("open job", *bytes, kJobMessage, peer.uid, *decoded_, &request));
    core_->OpenJob(peer, std::move(secret), std::move(request),
                   [hold = std::move(hold), done = MakeDone<v1::OpenJobResponse>(reactor, response)](
                       absl::StatusOr<v1::OpenJobResponse> result) { done(std::move(result)); });
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* TrainerService::ExtendJob(grpc::CallbackServerContext* context, const grpc::ByteBuffer* bytes,
                                                    grpc::ByteBuffer* response) {
  return AnswerCall(context, [&](grpc::ServerUnaryReactor* reactor) -> absl::Status {
    SHARDD_ASSIGN_OR_RETURN(const PeerCredentials peer, peers_->Lookup(context->peer()));
    v1::ExtendJobRequest request;
    SHARDD_ASSIGN_OR_RETURN(DecodedMemory::Hold hold,
                            DecodeFor("extend job", *bytes, kJobMessage, peer.uid, *decoded_, &request));
    core_->ExtendJob(peer, std::move(request),
                     [hold = std::move(hold), done = MakeDone<v1::ExtendJobResponse>(reactor, response)](
                         absl::StatusOr<v1::ExtendJobResponse> result) { done(std::move(result)); });
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* TrainerService::AttachRank(grpc::CallbackServerContext* context,
                                                     const grpc::ByteBuffer* bytes, grpc::ByteBuffer* response) {
  return AnswerCall(context, [&](grpc::ServerUnaryReactor* reactor) -> absl::Status {
    SHARDD_ASSIGN_OR_RETURN(const PeerCredentials peer, peers_->Lookup(context->peer()));
    SHARDD_ASSIGN_OR_RETURN(const JobSecret secret, SecretOf(*context));
    SHARDD_RETURN_IF_ERROR(CheckOpenFiles("attach rank"));
    v1::AttachRankRequest request;
    SHARDD_RETURN_IF_ERROR(DecodeWithin("attach rank", *bytes, kSmallMessage, &request));
    core_->AttachRank(peer, secret, peers_->DupPidfd(context->peer()), std::move(request),
                      MakeDone<v1::AttachRankResponse>(reactor, response));
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* TrainerService::OthersGradients(grpc::CallbackServerContext* context,
                                                          const grpc::ByteBuffer* bytes, grpc::ByteBuffer* response) {
  auto* const reactor = new HoldingReactor();
  const absl::StatusOr<PeerCredentials> peer = peers_->Lookup(context->peer());
  v1::OthersGradientsRequest request;
  absl::Status status = peer.status();
  status.Update(DecodeWithin("others' gradients", *bytes, kSmallMessage, &request));
  if (status.ok()) {
    AnswerOthersGradients(core_, *peer, std::move(request), reactor->held,
                          MakeDone<v1::OthersGradientsResponse>(reactor, response));
  } else {
    reactor->Finish(ToGrpcStatus(status));
  }
  return reactor;
}

grpc::ServerUnaryReactor* TrainerService::CloseJob(grpc::CallbackServerContext* context, const grpc::ByteBuffer* bytes,
                                                   grpc::ByteBuffer* response) {
  return AnswerCall(context, [&](grpc::ServerUnaryReactor* reactor) -> absl::Status {
    SHARDD_ASSIGN_OR_RETURN(const PeerCredentials peer, peers_->Lookup(context->peer()));
    SHARDD_ASSIGN_OR_RETURN(const JobSecret secret, SecretOf(*context));
    v1::CloseJobRequest request;
    SHARDD_RETURN_IF_ERROR(DecodeWithin("close job", *bytes, kSmallMessage, &request));
    const bool is_admin = peer.uid == 0 && peers_->MayAdminister(context->peer());
    core_->CloseJob(peer, secret, is_admin, request.job_id(),
                    [done = MakeDone<v1::CloseJobResponse>(reactor, response)](absl::Status status) {
                      done(status.ok() ? absl::StatusOr<v1::CloseJobResponse>(v1::CloseJobResponse()) : status);
                    });
    return absl::OkStatus();
  });
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* TrainerService::Session(
    grpc::CallbackServerContext* context) {
  absl::StatusOr<PeerCredentials> peer = peers_->Lookup(context->peer());
  if (!peer.ok()) {
    return RefuseSession(peer.status());
  }
  return ServeSession(core_, context, *peer, decoded_, ends_.get());
}

}  // namespace shardd
