#ifndef SHARDD_SERVER_JOB_NODES_SUMS_OVER_NODES_H_
#define SHARDD_SERVER_JOB_NODES_SUMS_OVER_NODES_H_

#include <functional>

#include "absl/status/status.h"
#include "common/plan/plan.h"
#include "server/job/gradients/pairing.h"
#include "server/multinode/node_listeners.h"

namespace shardd {

class AskedSteps;
class Committed;
struct GivenGradients;
class JobControl;
class NodeMember;
class StepDecision;

// Gradients over nodes: what this node's ranks give together is said to node 0 (Ready), and added when all nodes have
// theirs (Go), in the order of Go on every node. What a node closes without counts as none.
//
// Owns how many backwards of the running step all nodes have closed, and this one has said that it has. Loop-confined.
class SumsOverNodes final : public NodeSumsListener {
 public:
  struct Facts {
    const ShardPlan* plan = nullptr;
    const Committed* committed = nullptr;
    const StepDecision* decision = nullptr;
    const AskedSteps* steps = nullptr;
    const Pairing* pairing = nullptr;
  };
  struct Services {
    NodeMember* member = nullptr;
    JobControl* job = nullptr;
  };
  // Adds what all nodes give of the pair's occurrence.
  using Add = std::function<absl::Status(PairKey, int occurrence, const GivenGradients&)>;
  // All of these outlive it.
  SumsOverNodes(Facts facts, Services services, Add add) : see_(facts), use_(services), add_(std::move(add)) {}

  // The pair's occurrence is complete here.
  void SayReady(PairKey key, const Pairing::Said& said);
  int closed() const { return closed_; }
  // This node has closed backwards that it has not said; node 0 takes it that what was not said of them by then never
  // will be.
  bool MaySayClosed() const { return see_.pairing->ClosedToSay() > said_closed_; }
  void SayClosed();
  void EndStep() { closed_ = said_closed_ = 0; }

  void NodeGo(const v1::PeerMessage::Go& go) override;
  void NodesClosed(int backwards) override { closed_ = backwards; }

 private:
  const Facts see_;
  const Services use_;
  const Add add_;
  int closed_ = 0;
  int said_closed_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_NODES_SUMS_OVER_NODES_H_
