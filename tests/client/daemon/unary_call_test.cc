#include "client/c/daemon/unary_call.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "grpcpp/grpcpp.h"
#include "shardd/v1/trainer.grpc.pb.h"
#include "tests/testing/files.h"

namespace shardd {
namespace {

// As gRPC answers a call that comes to a server which is just ending.
class EndingService final : public v1::TrainerService::Service {
 public:
  grpc::Status OpenJob(grpc::ServerContext*, const v1::OpenJobRequest*, v1::OpenJobResponse*) override {
    return {grpc::StatusCode::CANCELLED, "CANCELLED"};
  }
};

TEST(UnaryCall, AServerThatEndsItsCallsIsShuttingDown) {
  const testing::TempDir folder;
  const std::string address = absl::StrCat("unix:", folder.path(), "/sock");
  EndingService service;
  grpc::ServerBuilder builder;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials());
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  ASSERT_NE(server, nullptr);
  const auto stub = v1::TrainerService::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  v1::OpenJobResponse response;
  Interrupt interrupt;
  const absl::Status status = UnaryCall("attach", stub.get(), &v1::TrainerService::Stub::AsyncOpenJob,
                                        v1::OpenJobRequest(), Deadline::In(absl::Seconds(30)), interrupt, &response);
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "attach: the daemon is shutting down")) << status;
}

}  // namespace
}  // namespace shardd
