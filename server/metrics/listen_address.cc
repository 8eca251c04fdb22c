#include "server/metrics/listen_address.h"

#include <arpa/inet.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace shardd {
namespace {

constexpr int kMaxPort = 65535;

}  // namespace

bool MetricsAddress::is_loopback() const { return absl::StartsWith(host, "127."); }

absl::StatusOr<MetricsAddress> ParseMetricsAddress(absl::string_view flag, absl::string_view text, bool insecure) {
  const auto refuse = [&](absl::string_view what) {
    return absl::UnimplementedError(absl::StrCat(flag, ": ", what, " (got \"", text,
                                                 "\", want host:port with an IPv4 address, as 127.0.0.1:9464)"));
  };
  if (absl::StartsWith(text, "unix:") || absl::StartsWith(text, "/")) return refuse("a Unix socket is not served");
  if (absl::StartsWith(text, "[") || absl::StrContains(text, "::")) return refuse("IPv6 is not served");
  if (absl::StartsWith(text, "https:")) {
    return refuse("TLS is not served; listen on the loopback, behind a proxy that has the certificate");
  }
  MetricsAddress address;
  const size_t colon = text.rfind(':');
  const absl::string_view host = text.substr(0, colon);
  in_addr parsed{};
  address.host = host == "localhost" ? "127.0.0.1" : std::string(host);
  if (colon == absl::string_view::npos || !absl::SimpleAtoi(text.substr(colon + 1), &address.port) ||
      address.port < 0 || address.port > kMaxPort || inet_pton(AF_INET, address.host.c_str(), &parsed) != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, ": no address (got \"", text, "\", want host:port, as 127.0.0.1:9464)"));
  }
  if (!address.is_loopback() && !insecure) {
    return absl::PermissionDeniedError(
        absl::StrCat(flag, ": whoever reaches ", text, " may read the names of all jobs and users (want 127.0.0.1, or ",
                     flag, " with --metrics_insecure where the network keeps others away)"));
  }
  return address;
}

}  // namespace shardd
