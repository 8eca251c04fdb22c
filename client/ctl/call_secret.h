#ifndef SHARDD_CLIENT_CTL_CALL_SECRET_H_
#define SHARDD_CLIENT_CTL_CALL_SECRET_H_

#include "client/ctl/options.h"
#include "common/secret/job_secret.h"
#include "grpcpp/grpcpp.h"

namespace shardd::ctl {

// Gives the secret of the caller's job along with the call, where there is one.
inline void AddJobSecret(const Options& options, grpc::ClientContext* context) {
  if (!options.job_secret.empty()) {
    context->AddMetadata(kJobSecretMetadata, options.job_secret);
  }
}

}  // namespace shardd::ctl

#endif  // SHARDD_CLIENT_CTL_CALL_SECRET_H_
