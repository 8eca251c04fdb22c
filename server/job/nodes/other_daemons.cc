#include "server/job/nodes/other_daemons.h"

#include "absl/strings/str_cat.h"
#include "server/peer/peer_links.h"

namespace shardd {

absl::Status OtherDaemons::CheckAll(Knows knows, const char* what, const char* lacks) const {
  for (int node = 0; node < plan_->nodes(); ++node) {
    if (node == links_->node() || (links_->*knows)(node)) continue;
    return absl::UnimplementedError(absl::StrCat(what, "the daemon of node ", node, " (",
                                                 plan_->config.nodes().addresses(node),
                                                 ") is of an older release, which ", lacks));
  }
  return absl::OkStatus();
}

bool OtherDaemons::AreReached() const {
  for (int node = 0; node < plan_->nodes(); ++node) {
    if (node != links_->node() && links_->protocol_version(node) == 0) return false;
  }
  return true;
}

absl::Status OtherDaemons::CheckTakeWrites() const {
  return CheckAll(&PeerLinks::takes_writes_where_cut, "",
                  "takes no values after the initial ones where parameters are cut over nodes; upgrade it, or load "
                  "before the job is opened");
}

absl::Status OtherDaemons::CheckExtend() const {
  return CheckAll(&PeerLinks::takes_extensions, "ExtendJob: ",
                  "does not train more on several nodes once the job is open; upgrade it, or say what is trained when "
                  "the job is opened");
}

}  // namespace shardd
