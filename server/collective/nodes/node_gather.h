#ifndef SHARDD_SERVER_COLLECTIVE_NODES_NODE_GATHER_H_
#define SHARDD_SERVER_COLLECTIVE_NODES_NODE_GATHER_H_

// Gathers parameters that are cut over nodes (common/plan/node_part.h) into a node's unsharded pool. The daemons' own
// connections do it for host memory (peer_gather.h), NCCL for GPU memory (nccl_gather.h). Nodes may ask for groups in
// any order: a node gives its part when it has the requested version, whether or not it needs the group itself.

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "shardd/v1/peer.pb.h"

namespace shardd {

// Thread-safe.
class NodeGather {
 public:
  using Done = std::function<void(absl::Status)>;
  // REQUIRES: no event arrives any more. Every `done` has run when it returns.
  virtual ~NodeGather() = default;

  // Gathers the other nodes' parts of the group at `version` (from 1) into `image`, the group's image in a pool slot,
  // and leaves this node's ranges alone. `done` runs once, not within the call, on a thread of this object, so it must
  // return soon; nothing touches the image afterwards. ABORTED: the generation has ended. UNAVAILABLE: a node is gone.
  // FAILED_PRECONDITION: a node has a later version. INVALID_ARGUMENT: impossible arguments, or a node sent what was
  // not asked for. An error of another node is passed on.
  // REQUIRES: at most twice as many gathers at a time as there are groups and pools; the other nodes refuse more.
  virtual void Gather(uint64_t generation, int group, uint64_t version, char* image, std::string label, Done done) = 0;
  // Sets the version that slab "shards" has; 0: nobody may read it, because it is about to be written. Returns when
  // nothing of the previous version is being read, within milliseconds. What needs a later version waits for it; what
  // needs an earlier one is refused.
  virtual void SetReadable(uint64_t version) = 0;
  // Ends what is under way of earlier generations, and refuses it from now on. Never blocks for other nodes.
  virtual void Begin(uint64_t generation) = 0;

  // Events of the links, on the network's threads. The loss of a link on which this generation had traffic ends the
  // generation here: gathers are then refused until the next one begins.
  virtual void OnUp(int node) = 0;
  // REQUIRES: message.pull() is set
  virtual void OnPull(int node, const v1::PeerMessage& message) = 0;
  // Parameters, for a gather that uses the daemons' connections.
  virtual void OnData(int /*node*/, const v1::PeerData& /*header*/, absl::string_view /*elements*/) {}
  virtual void OnDown(int node, const absl::Status& why) = 0;

  // Names what a gather asked for longer ago than `limit` (CLOCK_MONOTONIC, as MonotonicNow) waits for, with group and
  // version: "node 1 has not sent ..."; empty: there is none.
  virtual std::string Overdue(absl::Time now, absl::Duration limit) const = 0;
  // For status: how much was gathered and is under way.
  virtual std::string Describe() const = 0;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NODES_NODE_GATHER_H_
