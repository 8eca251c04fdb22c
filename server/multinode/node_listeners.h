#ifndef SHARDD_SERVER_MULTINODE_NODE_LISTENERS_H_
#define SHARDD_SERVER_MULTINODE_NODE_LISTENERS_H_

// Who a NodeMember reads, and who hears what it has to say, by what is said. All are called on the loop.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "shardd/v1/peer.pb.h"

namespace shardd {

class NodeFacts {
 public:
  virtual ~NodeFacts() = default;
  virtual int64_t NodeStep() const = 0;      // committed, or about to be
  virtual bool NodeInitialized() const = 0;  // likewise version 1
  virtual uint64_t NodeVersion() const = 0;  // likewise
  // In which generation that version was decided or agreed on; 0: not known.
  virtual uint64_t NodeVersionGeneration() const { return 0; }
};

class NodeSumsListener {
 public:
  virtual ~NodeSumsListener() = default;
  virtual void NodeGo(const v1::PeerMessage::Go& go) = 0;
  virtual void NodesClosed(int backwards) = 0;
};

class NodeStepsListener {
 public:
  virtual ~NodeStepsListener() = default;
  // Node 0: Decide is to follow. What each node has reduced, in their order.
  virtual void NodesReduced(const std::vector<v1::PeerMessage::Reduced>& reduced) = 0;
  virtual void NodeDecided(const v1::PeerMessage::Decided& decided) = 0;
  virtual void NodeValuesAgreed() = 0;
};

// The state of a node that has lost its own.
class NodeStateListener {
 public:
  virtual ~NodeStateListener() = default;
  // Is to be sent to `node`, as soon as no commit is under way; nothing is decided until that node takes part again.
  virtual void NodeSendState(int node, uint64_t transfer) = 0;
  // The link is lost.
  virtual void NodeStopSending(int node) = 0;
  // That node: is to be asked for (Fetch), and NodeMember::Restored to be called when it is there; until then no rank
  // is, and what the node had is nothing.
  virtual void NodeBeginFetch(int from, uint64_t transfer) = 0;
  virtual void NodeTakeState(const v1::PeerMessage::State& state) = 0;
  virtual void NodeTakeRankState(const v1::PeerMessage::RankState& state) = 0;
  // Nobody has what was asked for, and all begin anew: nothing of it is written any more.
  virtual void NodeEndFetch() = 0;
};

class NodeAttemptsListener {
 public:
  virtual ~NodeAttemptsListener() = default;
  // The attempt has ended on all nodes; AttemptEnded is to follow when it has here, behind a commit under way.
  virtual void NodeAbort(const absl::Status& cause) = 0;
  // Exchanges of earlier generations are to be ended.
  virtual void NodeGeneration(uint64_t generation) = 0;
  virtual void NodeIsUp() = 0;  // a link is there
  // All nodes' ranks ask to train the same more; `made`: all nodes have made the job that does so, and whatever comes
  // next belongs to that.
  virtual void NodesExtend(bool made) = 0;
  virtual void NodeClose(const std::string& why) = 0;
  // What came has been said, or NodeMember::held_step has grown: the job goes on with what may happen now.
  virtual void Advance() = 0;
};

struct NodeListeners {
  NodeSumsListener* sums = nullptr;
  NodeStepsListener* steps = nullptr;
  NodeStateListener* state = nullptr;
  NodeAttemptsListener* attempts = nullptr;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_MULTINODE_NODE_LISTENERS_H_
