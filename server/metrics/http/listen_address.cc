#include "server/metrics/http/listen_address.h"

#include <arpa/inet.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace shardd {
namespace {

constexpr int kMaxPort = 65535;

}  // namespace

bool MetricsAddress::is_local() const { return !path.empty() || absl::StartsWith(host, "127."); }

absl::Status CheckTlsFiles(const TlsFiles& tls) {
  if (tls.certificate.empty() == tls.key.empty() && (tls.ca.empty() || !tls.certificate.empty())) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("TLS: certificate and key belong together, and an authority to both (got \"", tls.certificate,
                   "\", \"", tls.key, "\" and \"", tls.ca, "\", want --tls_cert and --tls_key, or none)"));
}

absl::StatusOr<MetricsAddress> ParseMetricsAddress(absl::string_view flag, absl::string_view text, bool insecure,
                                                   bool tls) {
  MetricsAddress address;
  if (absl::string_view path = text; absl::ConsumePrefix(&path, "unix:") && absl::StartsWith(path, "/")) {
    address.path = std::string(path);
    return address;
  }
  if (absl::StartsWith(text, "[") || absl::StrContains(text, "::")) {
    return absl::UnimplementedError(absl::StrCat(flag, ": IPv6 is not served (got \"", text,
                                                 "\", want host:port with an IPv4 address, as 127.0.0.1:9464)"));
  }
  const size_t colon = text.rfind(':');
  const absl::string_view host = text.substr(0, colon);
  in_addr parsed{};
  address.host = host == "localhost" ? "127.0.0.1" : std::string(host);
  if (colon == absl::string_view::npos || !absl::SimpleAtoi(text.substr(colon + 1), &address.port) ||
      address.port < 0 || address.port > kMaxPort || inet_pton(AF_INET, address.host.c_str(), &parsed) != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, ": no address (got \"", text, "\", want host:port, as 127.0.0.1:9464, or unix:/path)"));
  }
  if (!address.is_local() && !tls && !insecure) {
    return absl::PermissionDeniedError(
        absl::StrCat(flag, ": whoever reaches ", text, " may read the names of all jobs and users (want 127.0.0.1, or ",
                     "TLS: shardd-metrics with --tls_cert, --tls_key and --tls_ca, shardd with its --peer_cert; or ",
                     flag, " with --metrics_insecure where the network keeps others away)"));
  }
  return address;
}

}  // namespace shardd
