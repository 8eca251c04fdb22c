#ifndef SHARDD_SERVER_METRICS_HTTP_LISTEN_ADDRESS_H_
#define SHARDD_SERVER_METRICS_HTTP_LISTEN_ADDRESS_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace shardd {

// Where metrics are served.
struct MetricsAddress {
  std::string path;  // of a Unix socket; empty: host and port
  std::string host;  // an IPv4 address
  int port = 0;      // 0: any free one
  // Whether nobody but this machine's users can reach it.
  bool is_local() const;
};

// PEM files for TLS. No certificate: no TLS.
struct TlsFiles {
  std::string certificate;  // with the chain behind it
  std::string key;
  std::string ca;  // clients need a certificate of this authority; empty: they need none
};
// INVALID_ARGUMENT: certificate and key are not both there, or an authority alone.
absl::Status CheckTlsFiles(const TlsFiles& tls);

// The address that `text` ("127.0.0.1:9464", "localhost:9464", "unix:/run/metrics.sock") gives. `flag`: where it comes
// from, for errors. INVALID_ARGUMENT: it is none. UNIMPLEMENTED: IPv6. PERMISSION_DENIED: others can reach it, who
// could read the names of all jobs and users, and there is neither `tls` nor is this `insecure`. Pure.
absl::StatusOr<MetricsAddress> ParseMetricsAddress(absl::string_view flag, absl::string_view text, bool insecure,
                                                   bool tls = false);

}  // namespace shardd

#endif  // SHARDD_SERVER_METRICS_HTTP_LISTEN_ADDRESS_H_
