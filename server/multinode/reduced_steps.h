#ifndef SHARDD_SERVER_MULTINODE_REDUCED_STEPS_H_
#define SHARDD_SERVER_MULTINODE_REDUCED_STEPS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/plan/plan.h"
#include "shardd/v1/peer.pb.h"

namespace shardd {

// "node 2 (host:port)", as errors name it.
std::string NodeText(const ShardPlan& plan, int node);

// Compares what the nodes say of one reduced step before node 0 decides it. `of_nodes`: node 0 first, one for each
// node. Returns FAILED_PRECONDITION where trainers of some nodes have dropped or written a gradient and others have
// not, and INTERNAL where nodes that are to be replicas of each other have another norm, or other parameters or
// optimizer state. Pure. REQUIRES: masks and digests have the sizes that the plan says, and digests may be empty.
absl::Status CompareReduced(const ShardPlan& plan, const std::vector<const v1::PeerMessage::Reduced*>& of_nodes);

}  // namespace shardd

#endif  // SHARDD_SERVER_MULTINODE_REDUCED_STEPS_H_
