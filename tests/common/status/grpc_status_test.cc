#include "common/status/grpc_status.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "grpcpp/support/status.h"

namespace shardd {
namespace {

struct Pair {
  absl::StatusCode absl_code;
  grpc::StatusCode grpc_code;
};
const std::vector<Pair>& AllCodes() {
  static const auto* codes = new std::vector<Pair>{
      {absl::StatusCode::kOk, grpc::StatusCode::OK},
      {absl::StatusCode::kCancelled, grpc::StatusCode::CANCELLED},
      {absl::StatusCode::kUnknown, grpc::StatusCode::UNKNOWN},
      {absl::StatusCode::kInvalidArgument, grpc::StatusCode::INVALID_ARGUMENT},
      {absl::StatusCode::kDeadlineExceeded, grpc::StatusCode::DEADLINE_EXCEEDED},
      {absl::StatusCode::kNotFound, grpc::StatusCode::NOT_FOUND},
      {absl::StatusCode::kAlreadyExists, grpc::StatusCode::ALREADY_EXISTS},
      {absl::StatusCode::kPermissionDenied, grpc::StatusCode::PERMISSION_DENIED},
      {absl::StatusCode::kResourceExhausted, grpc::StatusCode::RESOURCE_EXHAUSTED},
      {absl::StatusCode::kFailedPrecondition, grpc::StatusCode::FAILED_PRECONDITION},
      {absl::StatusCode::kAborted, grpc::StatusCode::ABORTED},
      {absl::StatusCode::kOutOfRange, grpc::StatusCode::OUT_OF_RANGE},
      {absl::StatusCode::kUnimplemented, grpc::StatusCode::UNIMPLEMENTED},
      {absl::StatusCode::kInternal, grpc::StatusCode::INTERNAL},
      {absl::StatusCode::kUnavailable, grpc::StatusCode::UNAVAILABLE},
      {absl::StatusCode::kDataLoss, grpc::StatusCode::DATA_LOSS},
      {absl::StatusCode::kUnauthenticated, grpc::StatusCode::UNAUTHENTICATED},
  };
  return *codes;
}

TEST(GrpcStatusTest, AllSeventeenCodesMeanTheSameOnBothSides) {
  ASSERT_EQ(AllCodes().size(), 17u);
  for (const Pair& pair : AllCodes()) {
    const std::string text = pair.absl_code == absl::StatusCode::kOk ? "" : "step 3: \"no\" \xc3\xa9";
    const absl::Status status(pair.absl_code, text);
    const grpc::Status sent = ToGrpcStatus(status);
    EXPECT_EQ(sent.error_code(), pair.grpc_code) << status;
    EXPECT_EQ(sent.error_message(), text);
    EXPECT_EQ(FromGrpcStatus(sent), status);
    EXPECT_EQ(FromGrpcStatus(grpc::Status(pair.grpc_code, text)).code(), pair.absl_code);
  }
}

TEST(GrpcStatusTest, CodesThatNobodyKnowsAreUnknownAndNeverOk) {
  const absl::Status status = FromGrpcStatus(grpc::Status(grpc::StatusCode::DO_NOT_USE, "from the future"));
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.code(), absl::StatusCode::kUnknown);
  EXPECT_EQ(status.message(), "from the future");
  // Neither on the way back: gRPC would refuse to send a code of its own numbering that does not exist.
  EXPECT_EQ(ToGrpcStatus(status).error_code(), grpc::StatusCode::UNKNOWN);
}

}  // namespace
}  // namespace shardd
