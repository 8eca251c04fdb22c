#ifndef SHARDD_SERVER_JOB_NODES_STEPS_OVER_NODES_H_
#define SHARDD_SERVER_JOB_NODES_STEPS_OVER_NODES_H_

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "common/plan/extend.h"
#include "common/plan/plan.h"
#include "common/tensor/norm.h"
#include "server/multinode/node_listeners.h"

namespace shardd {

class AskedSteps;
class Committed;
class GradientPresence;
class ModelDigests;
class NodeMember;
class StepDecision;

// A step over nodes is decided in one round: all say that theirs is reduced, node 0 measures, journals and says what it
// has found, and all update with that. Initial values are agreed on likewise.
//
// Owns the measure of this node's part of the running step. Loop-confined.
class StepsOverNodes final : public NodeStepsListener {
 public:
  struct Facts {
    const ShardPlan* plan = nullptr;
    const AskedSteps* steps = nullptr;
    const StepDecision* decision = nullptr;
    const ModelDigests* digests = nullptr;
  };
  struct Services {
    Committed* committed = nullptr;
    NodeMember* member = nullptr;
    GradientPresence* presence = nullptr;
  };
  struct Results {
    std::function<void(double norm)> measured;                     // over all nodes, on node 0: the step may be decided
    std::function<void(const v1::PeerMessage::Decided&)> decided;  // by node 0, elsewhere
    std::function<void()> agreed;                                  // on initial values, which are to be committed
    // Where the decided step is shown the attempt ends, on all nodes. Called before `decided`; on node 0 behind it.
    std::function<void(const absl::Status& cause)> ends;
  };
  // All of these outlive it.
  StepsOverNodes(Facts facts, Services services, Results results)
      : see_(facts), use_(services), tell_(std::move(results)), own_norm_(/*order=*/2) {}

  // All gradients of the step are reduced here, which is a promise, unless ranks have asked for a part of it. The
  // measure is of what this node has.
  void SayReduced(const Norm& own_norm);
  // The attempt is to end, on all nodes, behind the next step that this node has not said to be reduced.
  void EndAttemptBehindStep(const absl::Status& cause) { ends_ = std::string(cause.message()); }
  void EndEpoch() { ends_.clear(); }
  // The step is journaled here: node 0 tells the others, the others tell node 0 that they hold it.
  void SayDecided();
  // The same of a part of the step, of which nothing is journaled or held.
  void SayPart();
  // Between two steps: all ranks of this node ask to train more, or what does so is `made`.
  void SayExtends(const Extension& extension, bool made);

  void NodesReduced(const std::vector<v1::PeerMessage::Reduced>& reduced) override;
  void NodeDecided(const v1::PeerMessage::Decided& decided) override;
  void NodeValuesAgreed() override;

 private:
  void WritePromise();

  const Facts see_;
  const Services use_;
  const Results tell_;
  Norm own_norm_;
  std::string ends_;     // why this node wants the attempt to end; empty: it does not
  std::string all_end_;  // node 0: why the attempt ends behind the step that it decides
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_NODES_STEPS_OVER_NODES_H_
