#ifndef SHARDD_SERVER_SERVICE_ANSWER_H_
#define SHARDD_SERVER_SERVICE_ANSWER_H_

#include <functional>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "common/status/grpc_status.h"
#include "grpcpp/grpcpp.h"

namespace shardd {

// Ends the rpc exactly once: with the source's answer, or with CANCELLED when the source drops its callback. Shared by
// the copies of that callback (std::function copies).
template <typename Response>
class Answer {
 public:
  Answer(grpc::ServerUnaryReactor* reactor, Response* response) : reactor_(reactor), response_(response) {}
  Answer(const Answer&) = delete;
  Answer& operator=(const Answer&) = delete;
  ~Answer() { Finish(absl::CancelledError("the daemon is shutting down")); }

  void Finish(absl::StatusOr<Response> result) {
    grpc::ServerUnaryReactor* reactor = std::exchange(reactor_, nullptr);
    if (reactor == nullptr) {
      return;
    }
    if (result.ok()) {
      response_->Swap(&*result);
    }
    reactor->Finish(ToGrpcStatus(result.status()));
  }

 private:
  grpc::ServerUnaryReactor* reactor_;
  Response* const response_;
};

template <typename Response>
std::function<void(absl::StatusOr<Response>)> MakeDone(grpc::ServerUnaryReactor* reactor, Response* response) {
  return [answer = std::make_shared<Answer<Response>>(reactor, response)](absl::StatusOr<Response> result) {
    answer->Finish(std::move(result));
  };
}

}  // namespace shardd

#endif  // SHARDD_SERVER_SERVICE_ANSWER_H_
