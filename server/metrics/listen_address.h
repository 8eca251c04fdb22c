#ifndef SHARDD_SERVER_METRICS_LISTEN_ADDRESS_H_
#define SHARDD_SERVER_METRICS_LISTEN_ADDRESS_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace shardd {

// Where metrics are served.
struct MetricsAddress {
  std::string host;  // an IPv4 address
  int port = 0;      // 0: any free one
  bool is_loopback() const;
};

// The address that `text` ("127.0.0.1:9464", "localhost:9464") gives. `flag`: where it comes from, for errors.
// INVALID_ARGUMENT: it is none. UNIMPLEMENTED, with the reason: a Unix socket, IPv6 or TLS, which Debian's civetweb,
// the HTTP server behind it, does not have. PERMISSION_DENIED: others can reach it, who could read the names of all
// jobs and users, and this is not `insecure`. Pure.
absl::StatusOr<MetricsAddress> ParseMetricsAddress(absl::string_view flag, absl::string_view text, bool insecure);

}  // namespace shardd

#endif  // SHARDD_SERVER_METRICS_LISTEN_ADDRESS_H_
