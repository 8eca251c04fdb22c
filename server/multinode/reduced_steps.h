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

// Number of digests that a node says of its values, by parameter (ModelDigests). Where rows of nodes are replicas of
// each other, those of update counts come first, which all nodes compare, and then those of the values, which nodes
// with the same place in their rows compare.
int DigestsOfNode(const ShardPlan& plan);

// Compares what the nodes say of one reduced step before node 0 decides it. `of_nodes`: node 0 first, one for each
// node. Returns FAILED_PRECONDITION where trainers of some nodes have dropped or written a gradient and others have
// not, and INTERNAL where nodes that are to be replicas of each other (of several rows, those with the same place) have
// another norm, or other parameters or optimizer state. Pure. REQUIRES: masks and digests have the sizes that the plan
// says, and digests may be empty.
absl::Status CompareReduced(const ShardPlan& plan, const std::vector<const v1::PeerMessage::Reduced*>& of_nodes);

}  // namespace shardd

#endif  // SHARDD_SERVER_MULTINODE_REDUCED_STEPS_H_
