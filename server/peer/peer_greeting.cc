#include "server/peer/peer_greeting.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "common/version.h"
#include "server/tenant/tenant.h"

namespace shardd {

v1::PeerHello PeerGreeting::Hello(absl::string_view token, int to) const {
  v1::PeerHello hello;
  hello.set_protocol_version(kProtocolVersion);
  hello.set_job(join_.job);
  hello.set_uid(join_.uid);
  hello.set_node(join_.node);
  hello.set_token(std::string(token));
  hello.set_secret_proof(MakeLinkProof(join_.link_key, token, join_.node, to));
  return hello;
}

absl::Status PeerGreeting::Check(const v1::PeerHello& hello) const {
  const std::string job = absl::StrCat("job \"", join_.job, "\" on node ", join_.node);
  if (hello.protocol_version() != kProtocolVersion) {
    return absl::UnimplementedError(absl::StrCat(job, ": daemons of different versions (got protocol ",
                                                 hello.protocol_version(), ", want ", kProtocolVersion,
                                                 "); run the same shardd on all nodes"));
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
