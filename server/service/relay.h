#ifndef SHARDD_SERVER_SERVICE_RELAY_H_
#define SHARDD_SERVER_SERVICE_RELAY_H_

// Between clients and gRPC: every connection's bytes go through here, both ways, and a client's frames at the pace that
// its account allows (http2_meter.h). What is too fast waits in the client's own socket: nothing is refused, and
// nothing of it is in gRPC's memory or on its threads. Steps of trainers do not pass here, their commands are in rings.
//
//   client --socket--> relay: metered --socket pair--> gRPC
//          <---------- relay: as it is <--------------

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/shm/unique_fd.h"

namespace shardd {

struct RelayOptions {
  // Of a core's time per second, and how much may be saved up. One connection's, and that of one uid's together.
  double connection_rate = 0.25;
  absl::Duration connection_burst = absl::Milliseconds(500);
  double uid_rate = 0.5;
  absl::Duration uid_burst = absl::Seconds(1);
  // From the first byte to the first call. A connection that never makes one is closed.
  absl::Duration first_call_timeout = absl::Seconds(60);
  // Of a connection that is refused, to its end.
  absl::Duration refusal_timeout = absl::Seconds(5);
};

// Owns the connections and one thread, which never waits for any of them. Thread-safe.
class Relay {
 public:
  // INTERNAL, RESOURCE_EXHAUSTED: no epoll.
  static absl::StatusOr<std::unique_ptr<Relay>> Create(const RelayOptions& options = {});
  // Ends all connections, after up to a second for what gRPC has said last.
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  // Carries what `client`, of `uid`, and `inner`, the other end of gRPC's, say to each other until one of them has
  // closed. Both are non-blocking. Does not block.
  void Add(UniqueFd client, UniqueFd inner, uint32_t uid);
  // Answers the first call of `client` with `status`, and closes. Does not block.
  void Refuse(UniqueFd client, const absl::Status& status);

 private:
  class Impl;
  explicit Relay(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_SERVICE_RELAY_H_
