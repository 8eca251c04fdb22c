#ifndef SHARDD_CLIENT_CTL_ADDRESS_H_
#define SHARDD_CLIENT_CTL_ADDRESS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/shm/unique_fd.h"

namespace shardd::ctl {

struct Connection {
  std::string path;
  UniqueFd socket;  // connected, non-blocking
};

// Connects to `address`, or, where it is empty, to SHARDD_ADDRESS, or, where that is unset or empty, to the first of
// the usual places where a daemon listens: the order in which the client library looks. Never starts a daemon.
// INVALID_ARGUMENT: not an address. UNAVAILABLE: nobody listens (every place that was tried is named).
absl::StatusOr<Connection> ConnectToDaemon(const std::string& address);

// The usual places, in order.
std::vector<std::string> UsualSocketPaths();

}  // namespace shardd::ctl

#endif  // SHARDD_CLIENT_CTL_ADDRESS_H_
