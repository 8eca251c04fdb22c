#ifndef SHARDD_SERVER_PEER_LINK_CREDENTIALS_H_
#define SHARDD_SERVER_PEER_LINK_CREDENTIALS_H_

#include <functional>
#include <memory>
#include <string>

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
  // Why other daemons reject this daemon's certificate now; empty: it is valid. Reads a file; any thread.
  std::function<std::string()> own_problem = [] { return std::string(); };
};

// Mutual TLS, by what stands in the files whenever a connection is made, or no credentials if that is allowed. Errors
// as PeerNetwork::Create.
absl::StatusOr<LinkCredentials> MakeLinkCredentials(const PeerNetwork::Options& options);

// The host of "host:port", without brackets; a view of `address`. REQUIRES: CheckPeerAddress returned OK.
absl::string_view HostOf(absl::string_view address);

// Checks for "host:port", with an IPv6 address in brackets. INVALID_ARGUMENT otherwise; the text begins with `what`.
absl::Status CheckPeerAddress(absl::string_view what, absl::string_view address);

}  // namespace shardd

#endif  // SHARDD_SERVER_PEER_LINK_CREDENTIALS_H_
