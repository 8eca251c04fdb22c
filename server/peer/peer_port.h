#ifndef SHARDD_SERVER_PEER_PEER_PORT_H_
#define SHARDD_SERVER_PEER_PEER_PORT_H_

// The port that daemons of other nodes connect to. gRPC would accept whatever comes and work as fast as anybody sends:
//
//   accept -> first byte, within first_byte_timeout -> relay (server/relay/relay.h), if strangers may send -> gRPC
//
// A source, which is a host's address, has so many connections and so much of the daemon's time. Others are not
// affected by what it does. Strangers may send only where neither TLS nor --peer_insecure is given: other users of this
// host reach the loopback. Otherwise gRPC gets the connection itself, because the relay copies gradients once more:
// with TLS the connection's price pays for the handshake, which gRPC ends after 10 s, and who has a certificate of the
// cluster is trusted with the rest; with --peer_insecure whoever reaches the port is.

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/server_builder.h"

namespace shardd {

struct PeerPortOptions {
  std::string listen;  // "host:port", checked (CheckPeerAddress)
  bool tls = false;
  bool strangers = true;  // may reach the port and send frames: they are metered
  absl::Duration first_byte_timeout = absl::Seconds(10);
  // Beyond the first two a new connection is closed at once. A job needs two for each other node. Less where the daemon
  // may have few descriptors: a source's connections use at most a quarter of them, and all together a half.
  int max_connections_per_source = 1024;
  int max_connections = 4096;
  int max_silent = 512;  // without a first byte; for another one the oldest is closed
};

// Owns the listening sockets, the relay and the thread that accepts. Thread-safe.
class PeerPort {
 public:
  // Binds every address of the host; connections wait until Serve. UNAVAILABLE: the address is taken, or is not this
  // host's. May block while the host's name is resolved.
  static absl::StatusOr<std::unique_ptr<PeerPort>> Listen(const PeerPortOptions& options);
  // Stop() and the end of all connections, after up to a second for gRPC's last bytes.
  ~PeerPort();
  PeerPort(const PeerPort&) = delete;
  PeerPort& operator=(const PeerPort&) = delete;

  int port() const;
  // Accepts from now on. `grpc` must outlive Stop(). REQUIRES: called once.
  absl::Status Serve(grpc::experimental::ExternalConnectionAcceptor* grpc);
  // Accepts no more. What gRPC has goes on. Idempotent.
  void Stop();

 private:
  class Impl;
  explicit PeerPort(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_PEER_PEER_PORT_H_
