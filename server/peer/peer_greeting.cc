#include "server/peer/peer_greeting.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "common/versions/versions.h"
#include "server/tenant/tenant.h"

namespace shardd {

absl::StatusOr<int> PeerGreeting::CommonProtocol(const v1::PeerHello& hello) {
  // Either side may read it.
  const std::string theirs = absl::StrCat("node ", hello.node(), "'s daemon");
  absl::StatusOr<int> common =
      CommonVersion("protocol version", {"the daemon that refuses", kProtocolVersions},
                    {theirs, SaidRange(hello.protocol_version(), hello.newest_protocol_version())});
  return common.ok() ? common : absl::UnimplementedError(common.status().message());
}

v1::PeerHello PeerGreeting::Hello(absl::string_view token, int to) const {
  v1::PeerHello hello;
  hello.set_protocol_version(kProtocolVersions.oldest);
  hello.set_newest_protocol_version(kProtocolVersions.newest);
  hello.set_takes_writes_where_cut(true);
  hello.set_takes_extensions(true);
  hello.set_takes_fetch_ends(true);
  hello.set_job(join_.job);
  hello.set_uid(join_.uid);
  hello.set_node(join_.node);
  hello.set_token(std::string(token));
  hello.set_secret_proof(MakeLinkProof(join_.link_key, token, join_.node, to));
  hello.set_data_path(join_.data_path);
  return hello;
}

absl::Status PeerGreeting::Check(const v1::PeerHello& hello) const {
  const std::string job = absl::StrCat("job \"", join_.job, "\" on node ", join_.node);
  if (const absl::Status status = CommonProtocol(hello).status(); !status.ok()) {
    return absl::Status(status.code(), absl::StrCat(job, ": ", status.message()));
  }
  if (hello.job() != join_.job) {
    return absl::FailedPreconditionError(absl::StrCat(job, ": another job"));
  }
  if (hello.uid() != join_.uid) {
    return absl::PermissionDeniedError(
        absl::StrCat(job, ": it belongs to another user here (got uid ", hello.uid(), ", want ", join_.uid, ")"));
  }
  if (hello.node() < 0 || hello.node() >= nodes() || hello.node() == join_.node) {
    return absl::FailedPreconditionError(absl::StrCat(job, ": no such other node (got node ", hello.node(), " of ",
                                                      nodes(), "); give every node its own number"));
  }
  return absl::OkStatus();
}

absl::Status PeerGreeting::CheckSecret(const v1::PeerHello& hello, absl::string_view token) const {
  if (IsLinkProof(hello.secret_proof(), join_.link_key, token, hello.node(), join_.node)) {
    return absl::OkStatus();
  }
  return absl::PermissionDeniedError(absl::StrCat("job \"", join_.job, "\": node ", hello.node(), " has opened it ",
                                                  hello.secret_proof().empty() ? "without a secret" : "with a secret",
                                                  " and node ", join_.node,
                                                  join_.link_key.empty()         ? " without one"
                                                  : hello.secret_proof().empty() ? " with one"
                                                                                 : " with another one",
                                                  "; give the ranks of all nodes the same SHARDD_JOB_SECRET"));
}

}  // namespace shardd
