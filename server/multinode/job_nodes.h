#ifndef SHARDD_SERVER_MULTINODE_JOB_NODES_H_
#define SHARDD_SERVER_MULTINODE_JOB_NODES_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "common/plan/plan.h"
#include "common/tensor/norm.h"
#include "server/collective/nodes/node_collective.h"
#include "server/collective/nodes/node_gather.h"
#include "server/multinode/node_events.h"
#include "server/multinode/node_fetch.h"
#include "server/multinode/node_member.h"
#include "server/multinode/replica_digests.h"
#include "server/multinode/state_senders.h"

namespace shardd {

// What is made for a job over several nodes when it is opened (core_nodes.cc).
struct NodeParts {
  int node = 0;
  std::shared_ptr<NodeEvents> events;
  std::unique_ptr<PeerLinks> links;      // of `events`; used by the exchange of `collective`
  NodeCollective* collective = nullptr;  // the job's
  std::unique_ptr<NodeGather> gather;    // where parameters are cut over nodes, else null; uses `links` and slabs
  CoreLoop* worker = nullptr;            // reads initial values
  ~NodeParts() {
    if (events != nullptr && links != nullptr) events->ForgetExchange();  // it came to no job
  }
};

// One job's other nodes, as far as the job is concerned: the links to them, what this node has said of the running step
// and heard of theirs, and states on their way. Owns all of these. Loop-confined.
class JobNodes {
 public:
  // Takes links and events out of `parts`. `job` outlives it.
  JobNodes(std::shared_ptr<const ShardPlan> plan, CoreLoop* loop, NodeParts* parts, NodeJob* job);
  // Nothing reaches exchanges any more, which may then go; they go before this, which ends the links.
  void ForgetExchange() { events_->ForgetExchange(); }

  NodeMember& member() { return member_; }
  const NodeMember& member() const { return member_; }
  bool promised() const { return member_.promised(); }
  // Reads what takes as long as the model is large.
  CoreLoop* worker() const { return worker_; }

  // The running step. How many of its backwards all nodes have closed, and this one has said that it has.
  int closed() const { return closed_; }
  int said_closed() const { return said_closed_; }
  void HearClosed(int backwards) { closed_ = backwards; }
  void SayClosed(int64_t step, int backwards, const v1::Step& ranks_step);
  // `present`, `fresh`: what this node's ranks give together, by index_in_group.
  void SayReady(int64_t step, int backward, int group, int occurrence, const std::vector<bool>& present,
                const std::vector<bool>& fresh);
  // All gradients of `step` are reduced here, which began with `version`. The measure is of this node's part.
  void SayReduced(int64_t step, uint64_t version, const std::vector<bool>& present, const Norm& own_norm);
  // As SayReduced was told.
  const Norm& own_norm() const { return own_norm_; }
  void EndStep() { closed_ = said_closed_ = 0; }
  // Sums of an attempt that has ended are dropped.
  void BeginGeneration(uint64_t generation) { sums_->Begin(generation); }
  // Says nothing any more, and hears nothing.
  void Stop();

  ReplicaDigests& digests() { return digests_; }
  const ReplicaDigests& digests() const { return digests_; }
  StateSenders& senders() { return senders_; }
  const StateSenders& senders() const { return senders_; }

  // This node's state comes from another. The fetch before comes to nothing.
  const std::shared_ptr<NodeFetch>& BeginFetch(int from, uint64_t transfer, int ranks);
  // Its bytes go to `slabs`, and to nobody else.
  void TakeBytes(std::shared_ptr<NodeRestore> slabs);
  void AskForState(int from, uint64_t transfer);
  void EndFetch();
  // Null where nothing is fetched; of an earlier attempt where member().fetching() is false.
  const std::shared_ptr<NodeFetch>& fetch() const { return fetch_; }

 private:
  CoreLoop* const worker_;
  NodeCollective* const sums_;
  const std::shared_ptr<NodeEvents> events_;
  const std::unique_ptr<PeerLinks> links_;
  NodeMember member_;
  StateSenders senders_;
  ReplicaDigests digests_;
  std::shared_ptr<NodeFetch> fetch_;
  int closed_ = 0;
  int said_closed_ = 0;
  Norm own_norm_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_MULTINODE_JOB_NODES_H_
