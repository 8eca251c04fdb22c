#ifndef SHARDD_SERVER_COLLECTIVE_NODES_NODE_COLLECTIVE_H_
#define SHARDD_SERVER_COLLECTIVE_NODES_NODE_COLLECTIVE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/collective/collective.h"
#include "server/collective/nodes/node_exchange.h"

namespace shardd {

class NodeSums;

// Sums over the ranks of several nodes, of which this one has devices.size(). Gathers are `local/`'s. A sum
// (ReduceScatterRequest.nodes) has three parts, on kPostBackward of the ranks' devices where it is theirs:
// 1. each rank's device adds this node's sources of the rank's work segments, in fp32, into a slot of its staging;
// 2. the exchange adds what lies there over the nodes;
// 3. each rank's device writes its part of the gradient shards, as a reduction of one fp32 source would: scaled,
// rounded
//    once to the request's reduce_dtype (else the sources'), over or onto what is there, with the copies for replicas.
// At most kNodeSlots sums are in staging at a time. Others wait, and so do 2 and 3 of a sum for those of the one before
// it, so the callers' order of `sequence` is the order of sums on every node. A sum of which no node gives a trainable
// parameter is not exchanged, nor counted there.
//
// Over one node the bits are those of `local/`, but where reduce_dtype is narrower than what the sources hold: they are
// not rounded before they are added; and fp64 sources are rounded to fp32 before the scale. Over more the addends are
// nodes' sums and not ranks' gradients: added in another order, and -0 that one node alone gives becomes 0.
//
// Errors: of a device or of the exchange, the first one of a request is its result, and that of every later request of
// the generation, which wants another one then. A malformed request, or one whose sequence is not the next, is done
// with INVALID_ARGUMENT and takes no sequence. A request's sources, gradient shards and slot are its own until its
// `done`. Thread-safe; never blocks, but for the destructor.
class NodeCollective final : public Collective {
 public:
  // devices[r] and staging[r], of kNodeSlots times slot_bytes at a multiple of kSlabAlignmentBytes, are rank r's; both
  // outlive every `done`. The request's own staging is not looked at. REQUIRES: as many stagings as devices, >= 1.
  NodeCollective(std::vector<Device*> devices, std::shared_ptr<NodeExchange> exchange, std::vector<char*> staging,
                 int64_t slot_bytes);
  // What waits is done with CANCELLED, what is under way when it has ended. Waits for calls of the exchange to return.
  ~NodeCollective() override;

  const char* name() const override { return "nodes"; }
  std::string Describe() const override;
  // In the order of sequences, within a generation from 0. A newer generation begins with its first request at the
  // latest; one that is over is ABORTED.
  void ReduceScatter(ReduceScatterRequest request, Done done) override;
  void AllGather(AllGatherRequest request, Done done) override;
  bool may_hold_requests() const override { return true; }

  // Requests of earlier generations are done with ABORTED: at once where they wait, else when nothing of them is under
  // way any more; what has been summed over all nodes and is being written into gradient shards ends as it would. The
  // exchange is told. Again or of an earlier one: nothing.
  void Begin(uint64_t generation);

 private:
  const std::shared_ptr<NodeExchange> exchange_;
  // Shared: work of devices and sums of the exchange that end later come back to it.
  const std::shared_ptr<NodeSums> sums_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_NODES_NODE_COLLECTIVE_H_
