#ifndef SHARDD_SERVER_PEER_PEER_FLAGS_H_
#define SHARDD_SERVER_PEER_PEER_FLAGS_H_

// The daemon's flags --peer_*, from which it makes its network.

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/peer/peer_network.h"

namespace shardd {

struct PeerFlags {
  PeerNetwork::Options network;  // without `listen`: none is asked for
  std::string address;           // where others reach it; empty: where it listens
};

// INVALID_ARGUMENT, NOT_FOUND: what a daemon may know before it asks for the port, and gives another one's place to
// itself for it.
absl::Status CheckPeerFlags(const PeerFlags& flags);

// Null: none is asked for. Fills in the address. UNAVAILABLE: another process has had the port for all of `patience`.
absl::StatusOr<std::unique_ptr<PeerNetwork>> ListenForPeers(PeerFlags* flags, absl::Duration patience);

}  // namespace shardd

#endif  // SHARDD_SERVER_PEER_PEER_FLAGS_H_
