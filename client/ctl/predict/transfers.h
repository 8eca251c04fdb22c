#ifndef SHARDD_CLIENT_CTL_PREDICT_TRANSFERS_H_
#define SHARDD_CLIENT_CTL_PREDICT_TRANSFERS_H_

#include "common/plan/plan.h"

namespace shardd::ctl {

// How many nodes are meant. The plan may be that of fewer: as many as are served (kMaxNodes).
struct Fleet {
  int nodes = 1;
  int ranks = 1;  // of each node
  bool gpus = true;
};

// Bytes that one rank's links carry, in each direction. The rank stands for all: parts are taken for equal.
struct Traffic {
  double device_link_bytes = 0;  // to its node's other ranks
  double node_link_bytes = 0;    // to other nodes
  double memory_bytes = 0;       // read and written in its own memory: casts, sums
};

// Unsharding the group for one step's reader, as server/collective does it: what is cut over nodes comes from the ranks
// with the same number ("by rail"), once per node, and is spread within the node. Nothing where parameters are read in
// place.
Traffic GatherTraffic(const ShardPlan& plan, const Fleet& fleet, int group);

// Reducing the group's gradients: within the node in the dtype in which they are written, between nodes in fp32. Nodes
// that are replicas add and spread them (twice the part), nodes over which they are cut only add.
Traffic ReductionTraffic(const ShardPlan& plan, const Fleet& fleet, int group);

// The update of all that one rank owns: gradients, states and parameters are read, states and parameters and the copy
// in the computation's dtype are written.
double UpdateBytes(const ShardPlan& plan, const Fleet& fleet);

}  // namespace shardd::ctl

#endif  // SHARDD_CLIENT_CTL_PREDICT_TRANSFERS_H_
