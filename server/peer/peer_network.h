#ifndef SHARDD_SERVER_PEER_PEER_NETWORK_H_
#define SHARDD_SERVER_PEER_PEER_NETWORK_H_

// A daemon's connections to those of other nodes: one port, links for each job that spans several (peer_links.h).

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/peer/peer_links.h"

namespace shardd {

// One per daemon. Thread-safe.
class PeerNetwork {
 public:
  struct Options {
    // "host:port". Port 0: any free one, which port() tells.
    std::string listen;
    // Paths of PEM files: this daemon's certificate, its key, and the authority whose certificates all daemons of the
    // cluster show each other. All or none. They are read once. A certificate names the host as it stands in
    // JobConfig.nodes (subjectAltName, of names or addresses).
    std::string certificate, key, ca;
    // Without certificates, also where others than this host can reach it: anybody who can reach the port can then take
    // part in the jobs of this daemon.
    bool insecure = false;
    // A daemon that says nothing for so long, twice, is lost. Its end is known at once where its host lives.
    int keepalive_ms = 8'000;
  };

  // Serves when it returns. INVALID_ARGUMENT: options; NOT_FOUND: a file cannot be read; UNAVAILABLE: the address
  // cannot be listened on, or gRPC takes the certificates for none.
  static absl::StatusOr<std::unique_ptr<PeerNetwork>> Create(const Options& options);
  // REQUIRES: no PeerLinks of it live.
  virtual ~PeerNetwork() = default;

  virtual int port() const = 0;
  // "10.0.0.1:4711, mutual TLS": for status and log.
  virtual std::string Describe() const = 0;
  // This node's links to the job's others. Those with smaller numbers are called: again and again with 20 ms to 1 s
  // between, for as long as the links live, but for FAILED_PRECONDITION, which is told by OnDown
  // and are the end of it. Those with larger numbers call; one that Events::CheckHello refuses is told by OnDown with
  // UNAVAILABLE, for another may come yet.
  // `events` outlives the links; it may be called before this returns. ALREADY_EXISTS: a job of that name is joined.
  // INVALID_ARGUMENT: options.
  virtual absl::StatusOr<std::unique_ptr<PeerLinks>> Join(PeerJoin options, PeerLinks::Events* events) = 0;

 protected:
  PeerNetwork() = default;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_PEER_PEER_NETWORK_H_
