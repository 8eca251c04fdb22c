#ifndef SHARDD_SERVER_MULTINODE_NODE_COORDINATOR_H_
#define SHARDD_SERVER_MULTINODE_NODE_COORDINATOR_H_

// Node 0's part in a job that spans several nodes: pairs what nodes give by name, decides when a sum is made and in
// which order, when a step is everywhere reduced, and which attempt (generation) counts. A state machine of messages in
// and messages out, for node 0 itself as for the others; it moves no gradients and knows no ranks.
//
// A generation ends as one on all nodes (Begin): by what a node says, by a lost link, or by what nodes say that does
// not fit together. A decided step stays decided: who missed it hears of it in the answer to its next link. It is shown
// to ranks when every node that has not finished holds it (Held, AllHold), whichever generation that comes in.
//
// A node takes part from the answer to what it says that it has (Holds) to the end of its link. While node 0 has no
// parameters, which is so at the beginning and where its daemon is a new one (node_recovery.cc):
// - nodes that have none either take part: all give initial values, which are compared;
// - nodes that have parameters wait, and so nothing can be agreed on;
// - when every other node has been heard, node 0 goes on with the latest step: with its own, where it has outlived its
//   daemon, or else it is sent the state of the node that has it. The next generation begins with that: Begin tells
//   those a step behind what was decided, and the others what they lack. Of rows of nodes node 0 goes on as soon as it
//   knows what was decided: it is sent its own part as every other node that lacks one.
// No node is ever more than a step behind another, and a single one that comes early rolls nobody back. The state's
// sender is lost: another takes its place, or all begin anew where nobody has anything.

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
  // `recover`: node 0 is to ask that node for the job's state, Recovered is to follow; -1: it does not come any more.
  // Called as `send` is.
  // `generation`: the first; those of an earlier life of this daemon, which others may still be in, are passed as they
  // become known.
  NodeCoordinator(std::shared_ptr<const ShardPlan> plan, uint64_t generation, Send send, std::function<void()> decide,
                  std::function<void(int node)> recover);

  // Node 0's daemon is a new one, and has what the one before it has left. Before OnUp(0).
  void TakeUp(v1::PeerMessage::Holds own);
  void OnUp(int node);
  void OnDown(int node, const absl::Status& why);
  // Node 0 has the state that it was to ask for, of this step.
  void Recovered(int64_t step);
  // It wanted a link for another job of this name: whoever waits for it is told so, until it comes with this one.
  void OnRefused(int node, const absl::Status& why);
  // All its ranks have finished: its link may go.
  void OnFinished(int node);
  // It is sent what it has lost: others wait for as long as that takes. Then it has that; of node 0, of rows, `step`,
  // which it holds.
  void SetFetching(int node, bool fetching, int64_t step = 0);
  bool SomeFetch() const;
  // Of the kinds that go to node 0; anything else, and what does not fit the plan or the node's place in the step, ends
  // the generation.
  void OnMessage(int node, const v1::PeerMessage& message);
  // Node 0 has journaled it, and so holds it. REQUIRES: `decide` was called in this generation.
  void Decide(const v1::PeerMessage::Decided& decided);
  // Node 0 makes a part of the step. Nobody holds it; the next part, or the step, is closed and reduced anew. REQUIRES:
  // likewise, for a part.
  void DecidePart(const v1::PeerMessage::Decided& decided);
  // A node that others have waited for since `limit` ends the generation.
  void CheckSilence(absl::Time now, absl::Duration limit);

  uint64_t generation() const { return generation_; }
  // Node 0 has nothing of the job, and another node has its state, or has not said that it has none; of rows, its part.
  bool MayRecover() const;
  // What a node has reduced. REQUIRES: all have.
  const v1::PeerMessage::Reduced& reduced(int node) const { return *nodes_[static_cast<size_t>(node)].reduced; }
  bool takes_part(int node) const { return nodes_[static_cast<size_t>(node)].takes_part; }
  // Whom the nodes wait for, and for what; empty: nobody.
  std::string Waiting() const;
  // Node 0 has no parameters and others have: for what it waits before it has them, too. Else empty.
  std::string Lacking() const;
  // Who does not hold the last decided step yet; empty: all do.
  std::string Unheld() const;
  // Every other node has finished, or has heard of all that was decided over the link that it has now.
  bool AllServed() const;

 private:
  struct Node {
    bool up = false;
    bool takes_part = false;                      // it was sent Begin over this link
    std::optional<v1::PeerMessage::Holds> holds;  // over this link; of node 0: of the daemon before
    bool finished = false;
    bool fetching = false;
    bool has_state = false;  // parameters; of rows, those of its place
    int64_t held_step = 0;   // the last whose decision it holds, as it has said over this link
    std::string refused;     // why
    // Of the step:
    int closed = 0;  // backwards
    std::optional<v1::Step> step;
    std::optional<v1::PeerMessage::Reduced> reduced;
    std::optional<v1::PeerMessage::Values> values;
    v1::PeerMessage::AsksToWrite asks_to_write;       // the last
    std::optional<v1::PeerMessage::Extends> extends;  // likewise
    bool leaves = false;  // its link is about to go: its daemon wanted the attempt to end behind the decided step
  };
  using Key = std::tuple<int, int, int>;                    // backward, group, occurrence
  using Gives = std::vector<std::optional<v1::NodeGives>>;  // by node

  // (node_recovery.cc)
  void OnHolds(int node, const v1::PeerMessage::Holds& holds);
  absl::Status CheckHolds(int node, const v1::PeerMessage::Holds& holds) const;
  void Admit(int node);
  int Latest() const;   // of the nodes that have parameters, the one with the latest step; -1: none
  int Unheard() const;  // the first other node that has not said what it has, and still may; -1: none
  void MaybeRecover();
  void OnHeld(int node, int64_t step);
  void MaybeAllHold();
  absl::Status Handle(int node, const v1::PeerMessage& message);
  absl::Status OnReady(int node, const v1::PeerMessage::Ready& ready);
  absl::Status OnClosed(int node, const v1::PeerMessage::Closed& closed);
  absl::Status OnReduced(int node, const v1::PeerMessage::Reduced& reduced);
  absl::Status OnAsksToWrite(int node, const v1::PeerMessage::AsksToWrite& asks);
  absl::Status OnValues(int node, const v1::PeerMessage::Values& values);
  // (node_extension.cc)
  absl::Status OnExtends(int node, const v1::PeerMessage::Extends& extends);
  absl::Status CompareExtends() const;
  // The node goes on, with what is for node 0, while others wait for it to ask to train more.
  absl::Status CheckNobodyExtends(int node) const;
  // The node says something else than the step's next part behind the first.
  absl::Status CheckBetweenParts(int node, const v1::PeerMessage& message) const;
  std::string UnextendedText() const;  // for which nodes the others wait; empty: for none
  // How long a node that others wait for may say nothing, where that is `limit` otherwise.
  absl::Duration PatienceOf(absl::Duration limit) const;
  absl::Status CheckAllCanCome() const;
  absl::Status CheckStep(absl::string_view what, int64_t step) const;
  absl::Status TryGo(const Key& key);
  absl::Status MaybeAllClosed();
  absl::Status CompareSteps() const;
  absl::Status CompareAsks() const;
  absl::Status CompareValues() const;
  absl::Status CheckSameCommit(int node) const;
  absl::Status CheckNoneComputes() const;
  uint64_t Version() const;  // 0: not known
  void ForgetPart();         // what nodes have said of it
  void ForgetStep();
  void NextGeneration(const absl::Status& cause);
  // All end their attempts behind the decided step: the next generation begins when the links of all nodes that leave
  // are lost, so that nobody ends an attempt twice. Nobody is admitted before.
  bool AwaitsLeaver() const;
  void SendBegin(int node, const absl::Status& cause);
  void SendAll(const v1::PeerMessage& message);  // to nodes that are up, node 0 last
  std::string NodeText(int node) const;
  // The first node that has not come so far; -1: none.
  int Missing(const std::function<bool(const Node&)>& has) const;

  const std::shared_ptr<const ShardPlan> plan_;
  const Send send_;
  const std::function<void()> decide_;
  const std::function<void(int node)> recover_;

  std::vector<Node> nodes_;
  uint64_t generation_;
  uint64_t sequence_ = 0;  // of the next Go
  bool initialized_ = false;
  uint64_t agreed_generation_ = 0;    // for values of this one; 0: by an earlier daemon of node 0
  uint64_t values_agreed_ = 0;        // how often, so that each is a version beside the steps; 0: not known
  uint64_t version_generation_ = 0;   // in which the version was decided or agreed on; 0: not known
  v1::PeerMessage::Decided decided_;  // the last; step 0: none
  bool decided_known_ = true;         // all of it, not only its step
  int64_t held_step_ = 0;             // the last that all nodes have held
  bool showing_ = false;              // ranks of this attempt wait until all hold the decided step
  bool leaving_ = false;              // all have ended their attempt, or are about to; some Node::leaves
  int source_ = -1;                   // who sends node 0 the state; -1: nobody
  // The running step.
  std::map<Key, Gives> pending_;
  std::map<std::pair<int, int>, int> gone_;  // by (backward, group): how many sums were sent on their way
  int all_closed_ = 0;
  int may_write_times_ = 0;  // all nodes have asked so often in this version
  bool extending_ = false;   // all nodes have asked to train more, and make what does so
  bool deciding_ = false;
  int64_t parts_ = 0;                           // that all nodes make, or have made
  absl::Time progress_ = absl::InfinitePast();  // when a node last said something that fits
};

}  // namespace shardd

#endif  // SHARDD_SERVER_MULTINODE_NODE_COORDINATOR_H_
