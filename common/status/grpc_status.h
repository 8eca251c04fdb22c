#ifndef SHARDD_COMMON_STATUS_GRPC_STATUS_H_
#define SHARDD_COMMON_STATUS_GRPC_STATUS_H_

#include <string>

#include "absl/status/status.h"
#include "grpcpp/support/status.h"

namespace shardd {

// The only conversions between absl and gRPC statuses. Codes are numerically equal by definition; the message is kept.
// Only server/service and client include this.
inline grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) {
    return grpc::Status::OK;
  }
  // code(), not raw_code(): a number that neither side knows becomes UNKNOWN.
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message()));
}

inline absl::Status FromGrpcStatus(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

}  // namespace shardd

#endif  // SHARDD_COMMON_STATUS_GRPC_STATUS_H_
