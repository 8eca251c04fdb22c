#include "server/peer/link_credentials.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

constexpr int kMaxPort = 65535;

absl::StatusOr<std::string> ReadPem(absl::string_view flag, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  if (!file || !(text << file.rdbuf())) {
    return absl::NotFoundError(absl::StrCat("read ", flag, " \"", absl::CHexEscape(path),
                                            "\": ", errno == 0 ? "it is empty" : strerror(errno)));
  }
  if (!absl::StrContains(text.str(), "-----BEGIN ")) {
    return absl::InvalidArgumentError(absl::StrCat("read ", flag, " \"", absl::CHexEscape(path), "\": not a PEM file"));
  }
  return text.str();
}

// REQUIRES: CheckPeerAddress returned OK.
absl::string_view HostOf(absl::string_view address) {
  absl::string_view host = address.substr(0, address.rfind(':'));
  absl::ConsumePrefix(&host, "[");
  absl::ConsumeSuffix(&host, "]");
  return host;
}

bool IsLoopback(absl::string_view host) {
  if (host == "localhost" || host == "::1") {
    return true;
  }
  // An address, not a name that begins like one.
  return absl::StartsWith(host, "127.") && host.find_first_not_of("0123456789.") == absl::string_view::npos;
}

}  // namespace

absl::Status CheckPeerAddress(absl::string_view what, absl::string_view address) {
  const size_t colon = address.rfind(':');
  const absl::string_view host = address.substr(0, colon == absl::string_view::npos ? 0 : colon);
  int port = -1;
  bool ok = !host.empty() && absl::SimpleAtoi(address.substr(colon + 1), &port) && port >= 0 && port <= kMaxPort;
  if (absl::StartsWith(host, "[")) {
    ok = ok && absl::EndsWith(host, "]") && host.find_first_not_of("[]0123456789abcdefABCDEF:.%") == host.npos;
  } else {
    for (const char c : host) {
      ok = ok && (absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '-' || c == '_');
    }
  }
  if (!ok) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": not \"host:port\" (got \"", absl::CHexEscape(address), "\")"));
  }
  return absl::OkStatus();
}

absl::StatusOr<LinkCredentials> MakeLinkCredentials(const PeerNetwork::Options& options) {
  SHARDD_RETURN_IF_ERROR(CheckPeerAddress("--peer_listen", options.listen));
  const int given = !options.certificate.empty() + !options.key.empty() + !options.ca.empty();
  if (given == 0) {
    if (!options.insecure && !IsLoopback(HostOf(options.listen))) {
      return absl::InvalidArgumentError(
          absl::StrCat("--peer_listen: without TLS only this host may reach it (got \"", options.listen,
                       "\", want a loopback address); give --peer_cert, --peer_key and --peer_ca, or "
                       "--peer_insecure on a network that nobody else can reach"));
    }
    return LinkCredentials{grpc::InsecureServerCredentials(), grpc::InsecureChannelCredentials(), false};
  }
  if (given != 3) {
    return absl::InvalidArgumentError(
        absl::StrCat("--peer_cert, --peer_key and --peer_ca: TLS between nodes is mutual and takes all three (got ",
                     given, "); give the missing ",
                     options.certificate.empty() ? "--peer_cert"
                     : options.key.empty()       ? "--peer_key"
                                                 : "--peer_ca"));
  }
  if (options.insecure) {
    return absl::InvalidArgumentError(
        "--peer_insecure: certificates are given too (want one or the other); leave out --peer_insecure");
  }
  SHARDD_ASSIGN_OR_RETURN(const std::string certificate, ReadPem("--peer_cert", options.certificate));
  SHARDD_ASSIGN_OR_RETURN(const std::string key, ReadPem("--peer_key", options.key));
  SHARDD_ASSIGN_OR_RETURN(const std::string ca, ReadPem("--peer_ca", options.ca));
  grpc::SslServerCredentialsOptions server(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  server.pem_root_certs = ca;
  server.pem_key_cert_pairs.push_back({key, certificate});
  grpc::SslCredentialsOptions client;
  client.pem_root_certs = ca;
  client.pem_private_key = key;
  client.pem_cert_chain = certificate;
  return LinkCredentials{grpc::SslServerCredentials(server), grpc::SslCredentials(client), true};
}

}  // namespace shardd
