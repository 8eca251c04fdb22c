#ifndef SHARDD_SERVER_SERVICE_CALL_SECRET_H_
#define SHARDD_SERVER_SERVICE_CALL_SECRET_H_

#include "absl/status/statusor.h"
#include "grpcpp/grpcpp.h"
#include "server/tenant/tenant.h"

namespace shardd {

// The job secret in the call's metadata (common/secret/job_secret.h), or none. INVALID_ARGUMENT: more than one, or one
// of a wrong length; the text does not contain it.
absl::StatusOr<JobSecret> SecretOf(const grpc::CallbackServerContext& context);

}  // namespace shardd

#endif  // SHARDD_SERVER_SERVICE_CALL_SECRET_H_
