#ifndef SHARDD_SERVER_PEER_PEER_NETWORK_H_
#define SHARDD_SERVER_PEER_PEER_NETWORK_H_

// A daemon's connections to its peers: one port, and links for each job that spans several nodes (peer_links.h).

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/peer/peer_links.h"

namespace shardd {

// One per daemon. Thread-safe.
class PeerNetwork {
 public:
  struct Options {
    // "host:port". Port 0: any free port, which port() returns.
    std::string listen;
    // Paths of PEM files: this daemon's certificate, its key, and the authority of all daemons' certificates in the
    // cluster. All or none. A file that has changed serves the next connections. A certificate must have the host as it
    // is written in JobConfig.nodes (subjectAltName, names or addresses).
    std::string certificate, key, ca;
    absl::Duration certificate_interval = absl::Seconds(10);  // between two looks at the files; whole seconds
    // Allows links without certificates, even if other hosts can reach the port: anybody who can reach it can then take
    // part in this daemon's jobs.
    bool insecure = false;
    // A daemon that is silent for twice this time is lost. If its host lives, its end is known at once.
    int keepalive_ms = 8'000;
    // How long a daemon that calls, or is called, may take until the link is there; then it is called anew.
    absl::Duration handshake_patience = absl::Seconds(10);
  };

  // Serves when it returns. INVALID_ARGUMENT: bad options. NOT_FOUND: a file cannot be read. UNAVAILABLE: the address
  // cannot be listened on, or gRPC rejects the certificates.
  static absl::StatusOr<std::unique_ptr<PeerNetwork>> Create(const Options& options);
  // What Create says of its options, the files and the address, before it asks for the port.
  static absl::Status Check(const Options& options);
  // REQUIRES: none of its PeerLinks lives.
  virtual ~PeerNetwork() = default;

  // Lets go of the port, which another process may listen on from here on. What is connected goes on. Idempotent.
  virtual void StopListening() = 0;
  virtual int port() const = 0;
  // "10.0.0.1:4711, mutual TLS", for status and log.
  virtual std::string Describe() const = 0;
  // Makes this node's links to the job's other nodes. It calls nodes with smaller numbers, again and again with pauses
  // of 20 ms to 1 s, while the links live; FAILED_PRECONDITION ends that for a node and is reported by OnDown. Nodes
  // with larger numbers call this one; a caller that Events::CheckHello refuses is reported by OnDown with UNAVAILABLE,
  // because another may still come.
  // `events` must outlive the links and may be called before this returns. ALREADY_EXISTS: this daemon has joined a job
  // of that name and uid. INVALID_ARGUMENT: bad options.
  virtual absl::StatusOr<std::unique_ptr<PeerLinks>> Join(const PeerJoin& options, PeerLinks::Events* events) = 0;

 protected:
  PeerNetwork() = default;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_PEER_PEER_NETWORK_H_
