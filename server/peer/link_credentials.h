#ifndef SHARDD_SERVER_PEER_LINK_CREDENTIALS_H_
#define SHARDD_SERVER_PEER_LINK_CREDENTIALS_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "grpcpp/grpcpp.h"
#include "server/peer/peer_network.h"

namespace shardd {

// The credentials that a daemon uses towards the daemons of other nodes, as server and as client. (PeerCredentials of
// common/shm describe the process at the other end of a Unix socket.)
struct LinkCredentials {
  std::shared_ptr<grpc::ServerCredentials> server;
  std::shared_ptr<grpc::ChannelCredentials> client;
  bool tls = false;
};

// Mutual TLS, or no credentials if that is allowed. Errors as PeerNetwork::Create.
absl::StatusOr<LinkCredentials> MakeLinkCredentials(const PeerNetwork::Options& options);

// Checks for "host:port", with an IPv6 address in brackets. INVALID_ARGUMENT otherwise; the text begins with `what`.
absl::Status CheckPeerAddress(absl::string_view what, absl::string_view address);

}  // namespace shardd

#endif  // SHARDD_SERVER_PEER_LINK_CREDENTIALS_H_
