#ifndef SHARDD_SERVER_PEER_PEER_GREETING_H_
#define SHARDD_SERVER_PEER_PEER_GREETING_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/peer/peer_links.h"
#include "shardd/v1/peer.pb.h"

namespace shardd {

// What a node of a job says of itself when a link begins, and whether another node's word fits it. Pure.
class PeerGreeting {
 public:
  explicit PeerGreeting(const PeerJoin* join) : join_(*join) {}  // outlives this

  // The version of a link to who says this hello. UNIMPLEMENTED: there is none, until one of the two is upgraded.
  static absl::StatusOr<int> CommonProtocol(const v1::PeerHello& hello);

  // For node `to`; proves with `token`, the link's, that the job's secret is known here.
  v1::PeerHello Hello(absl::string_view token, int to) const;
  // UNIMPLEMENTED: no protocol version in common. FAILED_PRECONDITION: another job, or no such other node.
  // PERMISSION_DENIED: another user's job.
  absl::Status Check(const v1::PeerHello& hello) const;
  // PERMISSION_DENIED: the other node has another secret of the job, or one of the two has none. REQUIRES: Check is OK.
  absl::Status CheckSecret(const v1::PeerHello& hello, absl::string_view token) const;

 private:
  int nodes() const { return static_cast<int>(join_.addresses.size()); }

  const PeerJoin& join_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_PEER_PEER_GREETING_H_
