#ifndef SHARDD_SERVER_JOB_NODE_COORDINATOR_H_
#define SHARDD_SERVER_JOB_NODE_COORDINATOR_H_

// Node 0's part in a job that spans several nodes: pairs what nodes give by name, decides when a sum is made and in
// which order, when a step is everywhere reduced, and which attempt (generation) counts. A state machine of messages in
// and messages out, for node 0 itself as for the others; it moves no gradients and knows no ranks.
//
// A generation ends as one on all nodes (Begin): by what a node says, by a lost link, or by what nodes say that does
// not fit together. A decided step stays decided: who missed it hears of it in the answer to its next link.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/plan/plan.h"
#include "shardd/v1/peer.pb.h"

namespace shardd {

// What a node has said of why it gave up, as others may be told it: no loss of data of theirs.
absl::StatusCode NodeErrorCode(int code);

// Loop-confined.
class NodeCoordinator {
 public:
  using Send = std::function<void(int node, v1::PeerMessage)>;
  // `send` may be called within any call, also for node 0, and must not come back here before that returns. `decide`:
  // all nodes have reduced the step, Decide is to follow, later or never.
  // `generation`: the first; above those of an earlier life of this daemon, which others may still be in.
  NodeCoordinator(std::shared_ptr<const ShardPlan> plan, uint64_t generation, Send send, std::function<void()> decide);

  void OnUp(int node);
  void OnDown(int node, const absl::Status& why);
  // It wanted a link for another job of this name: whoever waits for it is told so, until it comes with this one.
  void OnRefused(int node, const absl::Status& why);
  // All its ranks have finished: its link may go.
  void OnFinished(int node);
  // It is sent what it has lost: others wait for as long as that takes.
  void SetFetching(int node, bool fetching) { nodes_[static_cast<size_t>(node)].fetching = fetching; }
  // Of the kinds that go to node 0; anything else, and what does not fit the plan or the node's place in the step, ends
  // the generation.
  void OnMessage(int node, const v1::PeerMessage& message);
  // Node 0 has journaled it. REQUIRES: `decide` was called in this generation.
  void Decide(const v1::PeerMessage::Decided& decided);
  // A node that others have waited for since `limit` ends the generation.
  void CheckSilence(absl::Time now, absl::Duration limit);

  uint64_t generation() const { return generation_; }
  bool up(int node) const { return nodes_[static_cast<size_t>(node)].up; }
  // Whom the nodes wait for, and for what; empty: nobody.
  std::string Waiting() const;

 private:
  struct Node {
    bool up = false;
    bool finished = false;
    bool fetching = false;
    std::string refused;  // why
    // Of the step:
    int closed = 0;  // backwards
    std::optional<v1::Step> step;
    std::optional<std::string> reduced;  // its presence mask
    std::optional<v1::PeerMessage::Values> values;
  };
  using Key = std::tuple<int, int, int>;                    // backward, group, occurrence
  using Gives = std::vector<std::optional<v1::NodeGives>>;  // by node

  absl::Status Handle(int node, const v1::PeerMessage& message);
  absl::Status OnReady(int node, const v1::PeerMessage::Ready& ready);
  absl::Status OnClosed(int node, const v1::PeerMessage::Closed& closed);
  absl::Status OnReduced(int node, const v1::PeerMessage::Reduced& reduced);
  absl::Status OnValues(int node, const v1::PeerMessage::Values& values);
  absl::Status CheckAllCanCome() const;
  absl::Status CheckStep(absl::string_view what, int64_t step) const;
  absl::Status TryGo(const Key& key);
  absl::Status MaybeAllClosed();
  absl::Status CompareSteps() const;
  absl::Status CompareValues() const;
  void ForgetStep();
  void NextGeneration(const absl::Status& cause);
  void SendBegin(int node, const absl::Status& cause);
  void SendAll(const v1::PeerMessage& message);  // to nodes that are up, node 0 last
  std::string NodeText(int node) const;
  // The first node that has not come so far; -1: none.
  int Missing(const std::function<bool(const Node&)>& has) const;

  const std::shared_ptr<const ShardPlan> plan_;
  const Send send_;
  const std::function<void()> decide_;

  std::vector<Node> nodes_;
  uint64_t generation_;
  uint64_t sequence_ = 0;  // of the next Go
  bool initialized_ = false;
  v1::PeerMessage::Decided decided_;  // the last; step 0: none
  // The running step.
  std::map<Key, Gives> pending_;
  std::map<std::pair<int, int>, int> gone_;  // by (backward, group): how many sums were sent on their way
  int all_closed_ = 0;
  bool deciding_ = false;
  absl::Time progress_ = absl::InfinitePast();  // when a node last said something that fits
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_NODE_COORDINATOR_H_
