#ifndef SHARDD_SERVER_COLLECTIVE_NODES_NODE_EXCHANGE_H_
#define SHARDD_SERVER_COLLECTIVE_NODES_NODE_EXCHANGE_H_

// What travels between the nodes of a job: sums over each node's ranks, added up over the nodes. By the daemons' own
// connections for memory of the host (peer_exchange.h), by NCCL for memory of GPUs (nccl_exchange.h).

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "shardd/v1/peer.pb.h"

namespace shardd {

// Memory of one local rank's device (its staging), fp32.
struct NodePart {
  int rank = 0;
  float* data = nullptr;  // aligned to 64 bytes
  int64_t numel = 0;      // > 0
  int node = -1;          // ReduceScatter: which node's the sum is
};

// Thread-safe.
class NodeExchange {
 public:
  using Done = std::function<void(absl::Status)>;
  // The destructor returns when nothing touches memory of parts any more, and every `done` has run.
  virtual ~NodeExchange() = default;
  virtual const char* name() const = 0;  // "peers", "nccl"
  // What status says: who adds, and why not another.
  virtual std::string Describe() const = 0;
  // In place: what lies in `parts` becomes the sum over all nodes, of fp32 in fp32, in the order of nodes for "peers",
  // in NCCL's for "nccl", with the same bits on every node. All nodes call it with the same generation, sequence and
  // parts (ranks, numels); sequences of a generation from 0 in their order, without gaps. Bytes of `parts` are there
  // when it is called. `done` runs once, on any thread, never within the call: with ABORTED where the generation was
  // ended, with UNAVAILABLE where a node is gone, INVALID_ARGUMENT where nodes differ. When it runs nothing touches the
  // parts any more.
  virtual void AllReduce(uint64_t generation, uint64_t sequence, std::vector<NodePart> parts, std::string label,
                         Done done) = 0;
  // Likewise, but each part, ascending by node, has to become the sum on its node alone: what lies in it elsewhere
  // afterwards is no one's. All of them share one count of sequences. An exchange that has no cheaper way gives all
  // nodes everything.
  virtual void ReduceScatter(uint64_t generation, uint64_t sequence, std::vector<NodePart> parts, std::string label,
                             Done done) {
    AllReduce(generation, sequence, std::move(parts), std::move(label), std::move(done));
  }
  // Ends what is under way of earlier generations, and refuses it from now on. Never blocks for other nodes.
  virtual void Begin(uint64_t generation) = 0;
  // What another node said to this one's exchange. Any thread.
  virtual void OnMessage(int node, const v1::PeerMessage::Exchange& message) = 0;
  // Elements that came for a sum, and a link that is lost. On the network's threads; for one that has its bytes from
  // there.
  virtual void OnData(int /*node*/, const v1::PeerData& /*header*/, absl::string_view /*elements*/) {}
  virtual void OnDown(int /*node*/, const absl::Status& /*why*/) {}
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NODES_NODE_EXCHANGE_H_
