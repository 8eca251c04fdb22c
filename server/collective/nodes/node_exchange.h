#ifndef SHARDD_SERVER_COLLECTIVE_NODES_NODE_EXCHANGE_H_
#define SHARDD_SERVER_COLLECTIVE_NODES_NODE_EXCHANGE_H_

// Adds each node's sums over the nodes of a job. The daemons' own connections do it for host memory (peer_exchange.h),
// NCCL for GPU memory (nccl_exchange.h).

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
  int node = -1;          // ReduceScatter: the node that gets the sum, in each row of nodes
};

// Thread-safe.
class NodeExchange {
 public:
  using Done = std::function<void(absl::Status)>;
  // When the destructor returns, nothing touches memory of parts any more, and every `done` has run.
  virtual ~NodeExchange() = default;
  virtual const char* name() const = 0;  // "peers", "nccl"
  // For status: who reduces, and why not another.
  virtual std::string Describe() const = 0;
  // In place: replaces `parts` by their fp32 sum over all nodes, added in fp32 in the order of nodes ("peers") or in
  // NCCL's ("nccl"), with the same bits on every node. All nodes must call it with the same generation, sequence and
  // parts (ranks, numels), in the order of sequences, which begin at 0 in each generation and have no gaps. The bytes
  // of `parts` must be ready. `done` runs once, on any thread, never within the call, and nothing touches the parts
  // afterwards. ABORTED: the generation has ended. UNAVAILABLE: a node is gone. INVALID_ARGUMENT: nodes differ.
  virtual void AllReduce(uint64_t generation, uint64_t sequence, std::vector<NodePart> parts, std::string label,
                         Done done) = 0;
  // The same, but only the node of each part (ascending by node; of several rows one in each, common/plan/node_part.h)
  // gets that part's sum; on other nodes its content is undefined afterwards. Shares one count of sequences with
  // AllReduce. An exchange without a cheaper way gives all nodes everything.
  virtual void ReduceScatter(uint64_t generation, uint64_t sequence, std::vector<NodePart> parts, std::string label,
                             Done done) {
    AllReduce(generation, sequence, std::move(parts), std::move(label), std::move(done));
  }
  // Ends what is under way of earlier generations, and refuses them from now on. Never blocks for other nodes.
  virtual void Begin(uint64_t generation) = 0;
  // A message from another node's exchange. Any thread.
  virtual void OnMessage(int node, const v1::PeerMessage::Exchange& message) = 0;
  // Elements for a sum, and a lost link, for an exchange that uses the daemons' connections. On the network's threads.
  virtual void OnData(int /*node*/, const v1::PeerData& /*header*/, absl::string_view /*elements*/) {}
  virtual void OnDown(int /*node*/, const absl::Status& /*why*/) {}
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NODES_NODE_EXCHANGE_H_
