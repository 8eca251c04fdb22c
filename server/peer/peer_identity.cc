#include "server/peer/peer_identity.h"

#include <arpa/inet.h>
#include <grpc/grpc_security_constants.h>

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "server/peer/link_credentials.h"

namespace shardd {
namespace {

// 4 or 16 bytes; empty: no address.
std::string AddressBytes(absl::string_view text) {
  std::string bytes(16, '\0');
  if (inet_pton(AF_INET6, std::string(text).c_str(), bytes.data()) == 1) {
    return bytes;
  }
  return inet_pton(AF_INET, std::string(text).c_str(), bytes.data()) == 1 ? bytes.substr(0, 4) : "";
}

bool Names(absl::string_view name, absl::string_view host) {
  if (const std::string address = AddressBytes(host); !address.empty()) {
    return AddressBytes(name) == address;
  }
  absl::ConsumeSuffix(&name, ".");
  absl::ConsumeSuffix(&host, ".");
  if (absl::EqualsIgnoreCase(name, host)) {
    return !name.empty();
  }
  if (!absl::ConsumePrefix(&name, "*.") || !absl::StrContains(name, '.')) {
    return false;
  }
  const size_t dot = host.find('.');
  return dot != absl::string_view::npos && dot > 0 && absl::EqualsIgnoreCase(name, host.substr(dot + 1));
}

}  // namespace

PeerIdentity IdentityOf(const grpc::AuthContext& context) {
  PeerIdentity identity;
  identity.tls = context.IsPeerAuthenticated();
  for (const char* property : {GRPC_X509_SAN_PROPERTY_NAME, GRPC_X509_CN_PROPERTY_NAME}) {
    for (const grpc::string_ref& value : context.FindPropertyValues(property)) {
      identity.names.emplace_back(value.data(), value.size());
    }
    if (!identity.names.empty()) {
      break;
    }
  }
  return identity;
}

absl::Status CheckIdentity(const PeerIdentity& identity, int node, absl::string_view address) {
  const absl::string_view host = HostOf(address);
  if (!identity.tls || std::any_of(identity.names.begin(), identity.names.end(),
                                   [host](const std::string& name) { return Names(name, host); })) {
    return absl::OkStatus();
  }
  return absl::PermissionDeniedError(absl::StrCat(
      "the certificate of who calls as node ", node, " is of another host (got \"",
      absl::CHexEscape(absl::StrJoin(identity.names, "\", \"")), "\", want \"", host,
      "\", as nodes.addresses has it); give each node a certificate whose subjectAltName is its host there"));
}

}  // namespace shardd
