#ifndef SHARDD_SERVER_SERVICE_ANSWER_H_
#define SHARDD_SERVER_SERVICE_ANSWER_H_

#include <functional>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "common/status/grpc_status.h"
#include "grpcpp/grpcpp.h"
#include "server/service/message.h"

namespace shardd {

// Ends the rpc exactly once: with the source's answer, or with CANCELLED if the source drops its callback. The copies
// of that callback share it (std::function copies). The rpc owns `bytes`.
template <typename Response>
class Answer {
 public:
  Answer(grpc::ServerUnaryReactor* reactor, grpc::ByteBuffer* bytes) : reactor_(reactor), bytes_(bytes) {}
  Answer(const Answer&) = delete;
  Answer& operator=(const Answer&) = delete;
  ~Answer() { Finish(absl::CancelledError("the daemon is shutting down")); }

  void Finish(absl::StatusOr<Response> result) {
    grpc::ServerUnaryReactor* reactor = std::exchange(reactor_, nullptr);
    if (reactor == nullptr) {
      return;
    }
    absl::Status status = result.status();
    if (status.ok()) {
      absl::StatusOr<grpc::ByteBuffer> bytes = Encode(*result);
      status = bytes.status();
      if (status.ok()) {
        *bytes_ = *std::move(bytes);
      }
    }
    reactor->Finish(ToGrpcStatus(status));
  }

 private:
  grpc::ServerUnaryReactor* reactor_;
  grpc::ByteBuffer* const bytes_;
};

template <typename Response>
std::function<void(absl::StatusOr<Response>)> MakeDone(grpc::ServerUnaryReactor* reactor, grpc::ByteBuffer* bytes) {
  return [answer = std::make_shared<Answer<Response>>(reactor, bytes)](absl::StatusOr<Response> result) {
    answer->Finish(std::move(result));
  };
}

}  // namespace shardd

#endif  // SHARDD_SERVER_SERVICE_ANSWER_H_
