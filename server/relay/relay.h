#ifndef SHARDD_SERVER_RELAY_RELAY_H_
#define SHARDD_SERVER_RELAY_RELAY_H_

// Stands between sockets and gRPC, for clients and for daemons of other nodes: every connection's bytes pass through,
// in both directions, a caller's frames only as fast as its account allows (http2_meter.h). The excess waits in the
// caller's own socket: nothing is refused, and none of it takes gRPC's memory or threads. Trainers' steps do not pass
// here, because their commands are in rings. "Client" below is whoever has connected, "uid" whoever shares an account:
// the user on this host, or a hash of another host's address.
//
//   client --socket--> relay: metered --socket pair--> gRPC
//          <---------- relay: as it is <--------------

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/shm/unique_fd.h"

namespace shardd {

struct RelayOptions {
  // Processor time per second, and how much of it may be saved up: for one connection, and for all of one uid together.
  double connection_rate = 0.25;
  absl::Duration connection_burst = absl::Milliseconds(500);
  double uid_rate = 0.5;
  absl::Duration uid_burst = absl::Seconds(1);
  // From the first byte to the first call. A connection without a call is closed then.
  absl::Duration first_call_timeout = absl::Seconds(60);
  // Limit for a refused connection.
  absl::Duration refusal_timeout = absl::Seconds(5);
  // Of each direction, while there are bytes in transit.
  size_t buffer_size_bytes = 16 << 10;
};

// Owns the connections and one thread, which never waits for any of them. Thread-safe.
class Relay {
 public:
  // INTERNAL, RESOURCE_EXHAUSTED: epoll is not available.
  static absl::StatusOr<std::unique_ptr<Relay>> Create(const RelayOptions& options = {});
  // Ends all connections, after up to a second for gRPC's last bytes.
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  // Relays between `client` (of `uid`) and `inner` (the other end is gRPC's) until one of them has closed, and drops
  // `place` then. Both must be non-blocking. Does not block.
  void Add(UniqueFd client, UniqueFd inner, uint32_t uid, std::shared_ptr<const void> place = nullptr);
  // Answers the first call of `client` with `status` and closes. Does not block.
  void Refuse(UniqueFd client, const absl::Status& status);

 private:
  class Impl;
  explicit Relay(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_RELAY_RELAY_H_
