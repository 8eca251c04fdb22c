#ifndef SHARDD_SERVER_PEER_BOUND_SOCKETS_H_
#define SHARDD_SERVER_PEER_BOUND_SOCKETS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/shm/unique_fd.h"

namespace shardd {

// TCP sockets that listen, non-blocking, all on one port.
struct BoundSockets {
  std::vector<UniqueFd> sockets;
  int port = 0;
};

// Listens on every address of the host in "host:port", which CheckPeerAddress has accepted; one is enough. 0.0.0.0 and
// [::] both mean all addresses, IPv4 and IPv6. Port 0: any free port. UNAVAILABLE: none can be listened on. May block
// while a name is resolved.
absl::StatusOr<BoundSockets> BindAll(const std::string& listen);

}  // namespace shardd

#endif  // SHARDD_SERVER_PEER_BOUND_SOCKETS_H_
