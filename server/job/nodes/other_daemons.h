#ifndef SHARDD_SERVER_JOB_NODES_OTHER_DAEMONS_H_
#define SHARDD_SERVER_JOB_NODES_OTHER_DAEMONS_H_

#include "absl/status/status.h"
#include "common/plan/plan.h"

namespace shardd {

class PeerLinks;

// What the daemons of a job's other nodes know, which may be of older releases. One without a link, which may have just
// gone, counts as one that knows it. Loop-confined; `plan` and `links` outlive it.
class OtherDaemons {
 public:
  OtherDaemons(const ShardPlan* plan, const PeerLinks* links) : plan_(plan), links_(links) {}

  // UNIMPLEMENTED, with the node: values after the initial ones, where parameters are cut over nodes.
  absl::Status CheckTakeWrites() const;
  // ... more to train on several nodes, once the job is open.
  absl::Status CheckExtend() const;
  // There is a link to each.
  bool AreReached() const;

 private:
  using Knows = bool (PeerLinks::*)(int node) const;
  // "the daemon of node 1 (address) is of an older release, which " + `lacks` where one does not.
  absl::Status CheckAll(Knows knows, const char* what, const char* lacks) const;

  const ShardPlan* const plan_;
  const PeerLinks* const links_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_NODES_OTHER_DAEMONS_H_
