#ifndef SHARDD_SERVER_PEER_PEER_IDENTITY_H_
#define SHARDD_SERVER_PEER_PEER_IDENTITY_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "grpcpp/grpcpp.h"

namespace shardd {

// The caller of a link, by its certificate, which TLS has checked. Immutable.
struct PeerIdentity {
  bool tls = false;  // false: the caller is unknown
  // Names and addresses of subjectAltName; if there are none, the subject's common name.
  std::vector<std::string> names;
};

PeerIdentity IdentityOf(const grpc::AuthContext& context);

// PERMISSION_DENIED: the link has TLS, and no name is the host of `address`, node `node`'s address in the job
// ("host:port" or "[host]:port"). A name "*.x.y" covers every host directly below x.y.
absl::Status CheckIdentity(const PeerIdentity& identity, int node, absl::string_view address);

}  // namespace shardd

#endif  // SHARDD_SERVER_PEER_PEER_IDENTITY_H_
