#ifndef SHARDD_SERVER_COLLECTIVE_NODES_NODE_COLLECTIVE_H_
#define SHARDD_SERVER_COLLECTIVE_NODES_NODE_COLLECTIVE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/collective/collective.h"

namespace shardd {

class Device;
class NodeExchange;
class NodeSums;

// Reduces over the ranks of several nodes, of which devices.size() are on this node. `local/` does the gathers. A
// reduction (ReduceScatterRequest.nodes) has three phases; the first and the last run on kPostBackward of the ranks'
// devices:
// 1. Each rank's device adds this node's sources of the rank's work segments, in fp32, into a slot of its staging.
// 2. The exchange adds the staged values over the nodes.
// 3. Each rank's device writes its part of the gradient shards, like a reduction with one fp32 source: scaled, rounded
//    once to the request's reduce_dtype (else the sources'), overwriting or accumulating, with the copies for replicas.
// At most kNodeSlots sums are in staging at a time. Later ones wait, and phases 2 and 3 of a sum wait for those of the
// sum before it, so the callers' order of `sequence` is the order of sums on every node. A sum to which no node
// contributes a trainable parameter is not exchanged, and the exchange does not count it.
//
// On one node the bits are those of `local/`, with two exceptions: if reduce_dtype is narrower than the sources',
// sources are not rounded before they are added; and fp64 sources are rounded to fp32 before the scale. On several
// nodes the addends are the nodes' sums instead of the ranks' gradients: the order of additions differs, and a -0 that
// only one node contributes becomes 0.
//
// The first error of a request, from a device or the exchange, is its result and that of every later request of the
// generation; then a new generation is needed. A malformed request, or one whose sequence is not the next, ends with
// INVALID_ARGUMENT and takes no sequence. The collective uses a request's sources, gradient shards and slot until its
// `done`. Thread-safe; only the destructor blocks.
class NodeCollective final : public Collective {
 public:
  // devices[r] and staging[r] are rank r's; staging[r] has kNodeSlots times slot_bytes, aligned to kSlabAlignmentBytes.
  // Both must outlive every `done`. The request's own staging is ignored. REQUIRES: as many stagings as devices, >= 1.
  NodeCollective(std::vector<Device*> devices, std::shared_ptr<NodeExchange> exchange, std::vector<char*> staging,
                 int64_t slot_bytes);
  // Ends waiting requests with CANCELLED, others when their work has ended. Blocks until calls of the exchange have
  // returned.
  ~NodeCollective() override;

  const char* name() const override { return "nodes"; }
  std::string Describe() const override;
  // Takes requests in the order of their sequences, which begin at 0 in each generation. The first request of a newer
  // generation begins that generation. ABORTED: the generation is over.
  void ReduceScatter(ReduceScatterRequest request, Done done) override;
  void AllGather(AllGatherRequest request, Done done) override;
  bool may_hold_requests() const override { return true; }

  // Begins a generation and tells the exchange. Ends requests of earlier generations with ABORTED: waiting ones at
  // once, others when their work has ended. A sum that all nodes have and that is being written into gradient shards
  // ends normally. Does nothing if the generation has begun or is over.
  void Begin(uint64_t generation);

 private:
  const std::shared_ptr<NodeExchange> exchange_;
  // Shared: work of devices and sums of the exchange may end later and call back.
  const std::shared_ptr<NodeSums> sums_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NODES_NODE_COLLECTIVE_H_
