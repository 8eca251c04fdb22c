#include "server/peer/peer_flags.h"

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/clock/monotonic_now.h"
#include "common/status/status_macros.h"
#include "server/observe/log.h"

namespace shardd {
namespace {

constexpr absl::Duration kPortAgain = absl::Milliseconds(20);

}  // namespace

absl::Status CheckPeerFlags(const PeerFlags& flags) {
  const PeerNetwork::Options& network = flags.network;
  if (network.listen.empty()) {
    if (flags.address.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError("--peer_address: nothing listens there (got no --peer_listen, want host:port)");
  }
  if (network.keepalive_ms < 1'000 || network.keepalive_ms > 600'000) {
    return absl::InvalidArgumentError(
        absl::StrCat("--peer_keepalive_ms: out of range (got ", network.keepalive_ms, ", want 1000 to 600000)"));
  }
  SHARDD_RETURN_IF_ERROR(PeerNetwork::Check(network));
  const std::string host = network.listen.substr(0, network.listen.rfind(':'));
  if (flags.address.empty() && (host == "0.0.0.0" || host == "[::]" || host.empty())) {
    return absl::InvalidArgumentError(absl::StrCat("--peer_listen: others cannot reach a wildcard (got ",
                                                   network.listen,
                                                   " and no --peer_address, want this host's name there)"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<PeerNetwork>> ListenForPeers(PeerFlags* flags, absl::Duration patience) {
  const std::string& listen = flags->network.listen;
  if (listen.empty()) return nullptr;
  const absl::Time end = MonotonicNow() + patience;
  absl::StatusOr<std::unique_ptr<PeerNetwork>> network = PeerNetwork::Create(flags->network);
  while (absl::IsUnavailable(network.status()) && MonotonicNow() < end) {
    absl::SleepFor(kPortAgain);
    network = PeerNetwork::Create(flags->network);
  }
  SHARDD_RETURN_IF_ERROR(network.status());
  if (flags->address.empty()) {  // with the actual port, if any was allowed
    flags->address = absl::StrCat(listen.substr(0, listen.rfind(':') + 1), (*network)->port());
  }
  LogInfo(
      absl::StrCat("other nodes reach this daemon at ", flags->address, " (listens on ", (*network)->Describe(), ")"));
  return network;
}

}  // namespace shardd
