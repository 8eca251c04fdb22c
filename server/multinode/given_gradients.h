#ifndef SHARDD_SERVER_MULTINODE_GIVEN_GRADIENTS_H_
#define SHARDD_SERVER_MULTINODE_GIVEN_GRADIENTS_H_

// What nodes give together of gradients, out of what each has said. Pure.

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "common/plan/plan.h"
#include "common/tensor/norm.h"
#include "shardd/v1/peer.pb.h"

namespace shardd {

// What all nodes give of one group in one backward, by index_in_group.
struct GivenGradients {
  std::vector<bool> present;
  std::vector<bool> fresh;  // replaces what the sum holds
  uint64_t sequence = 0;    // of the sum among all nodes'
};

// FAILED_PRECONDITION: a gradient replaces on one node and adds on another. Of parameters that are cut over nodes only
// those count that hold some of it, if any of them gives it. REQUIRES: a group of the plan, and what each node gives.
absl::StatusOr<GivenGradients> GivenByAll(const ShardPlan& plan, const v1::PeerMessage::Go& go);

// By parameter, whether there is a gradient: where some nodes hold none of the parameter, as those say that do.
// REQUIRES: masks of the plan's size, of each node in order.
std::vector<bool> PresentOnHolders(const ShardPlan& plan, const std::vector<v1::PeerMessage::Reduced>& reduced);

// The norm of all parts, each counted once: those of the nodes of row 0. REQUIRES: of each node in order.
Norm NormOverNodes(const ShardPlan& plan, double order, const std::vector<v1::PeerMessage::Reduced>& reduced);

}  // namespace shardd

#endif  // SHARDD_SERVER_MULTINODE_GIVEN_GRADIENTS_H_
