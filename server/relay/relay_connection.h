#ifndef SHARDD_SERVER_RELAY_RELAY_CONNECTION_H_
#define SHARDD_SERVER_RELAY_RELAY_CONNECTION_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "common/shm/unique_fd.h"
#include "server/relay/http2_meter.h"
#include "server/relay/relay_account.h"
#include "server/relay/relay_way.h"

namespace shardd {

// Whoever shares an account.
struct RelayUid {
  RelayAccount account;
  int connections = 0;
};

// One client's connection to gRPC, and what has been paid for it. Used by the relay's thread only.
struct RelayConnection {
  RelayConnection(UniqueFd client_fd, UniqueFd inner_fd, const RelayAccount& first_account, size_t buffer_size_bytes)
      : client(std::move(client_fd)), inner(std::move(inner_fd)), account(first_account) {
    up.buffer_size_bytes = down.buffer_size_bytes = buffer_size_bytes;
    up.from = down.to = client.get();
    up.to = down.from = inner.get();
  }
  std::shared_ptr<const void> place;  // dropped behind the sockets
  UniqueFd client;
  UniqueFd inner;  // invalid: the connection is refused
  uint32_t uid = 0;
  RelayAccount account;
  RelayUid* of_uid = nullptr;
  Http2Meter meter;
  RelayWay up, down;
  size_t passed_bytes = 0;  // of `up`, paid for
  bool paused = false;      // `up` waits for its timer
  bool queued = false;
  bool client_gone = false;  // in both directions; its last bytes may still be in the buffer
  bool grpc_gone = false;    // likewise
  bool dead = false;
  std::string refusal;  // the answer, as frames without the stream's number
  absl::Time deadline = absl::InfiniteFuture();
};

}  // namespace shardd

#endif  // SHARDD_SERVER_RELAY_RELAY_CONNECTION_H_
