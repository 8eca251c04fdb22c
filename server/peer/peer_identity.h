#ifndef SHARDD_SERVER_PEER_PEER_IDENTITY_H_
#define SHARDD_SERVER_PEER_PEER_IDENTITY_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "grpcpp/grpcpp.h"

namespace shardd {

// Who has called, as its certificate says, which TLS has checked. Immutable.
struct PeerIdentity {
  bool tls = false;  // false: nothing is known of it
  // Of subjectAltName, names and addresses; where there are none, the subject's common name.
  std::vector<std::string> names;
};

PeerIdentity IdentityOf(const grpc::AuthContext& context);

// PERMISSION_DENIED: TLS, and no name is the host of `address` ("host:port" or "[host]:port", as node `node` has in the
// job). A name "*.x.y" is that of every host directly below x.y.
absl::Status CheckIdentity(const PeerIdentity& identity, int node, absl::string_view address);

}  // namespace shardd

#endif  // SHARDD_SERVER_PEER_PEER_IDENTITY_H_
