#ifndef SHARDD_SERVER_MULTINODE_NODE_LEFT_H_
#define SHARDD_SERVER_MULTINODE_NODE_LEFT_H_

#include <cstdint>

#include "shardd/v1/peer.pb.h"

namespace shardd {

// What the daemon before has left of a node's part, beside the job's facts.
struct NodeLeft {
  v1::PeerMessage::Decided decided;  // of the committed step; step 0: it is not known
  uint64_t promised_in = 0;          // the generation in which the step behind that is promised; 0: it is not
  bool promised_values = false;      // not a step, but values that are to be the next version
  bool promised_parts = false;       // a step behind parts of it, whose changes lie in the shards
};

}  // namespace shardd

#endif  // SHARDD_SERVER_MULTINODE_NODE_LEFT_H_
