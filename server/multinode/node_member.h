#ifndef SHARDD_SERVER_MULTINODE_NODE_MEMBER_H_
#define SHARDD_SERVER_MULTINODE_NODE_MEMBER_H_

// A node's part in a job that spans several: what its job says goes to node 0 (node_coordinator.h; on node 0 over the
// loop instead of a link), what node 0 decides comes to the job, each in the generation that counts.
//
// A decided step is shown to ranks when all nodes hold it (held_step): each says so as soon as it has journaled the
// decision, and updates meanwhile. An attempt that ends in between ends without having shown it; the job has it, and
// nobody attaches before it may be shown (Lacking).
//
// A job that gives its attempt up says so and waits for the next generation; what it has to say of the next attempt by
// then is kept and sent in that. Between Reduced and what node 0 decides nothing is given up here (promised): the step
// may be decided already, and then it is committed on every node. Likewise with values that ranks write.
//
// Node 0 is lost: the attempt is given up, but not a promise, and the job is kept. On the next link the member says
// what it has (Holds), also to a daemon of node 0 that is a new one, and Begin says how it goes on (OnBegin):
// - the promised step was decided, and some node has it: it is committed here too;
// - it was not, or by nobody who is left: it is given up, and done anew by all;
// - the job is ahead of this node, which has lost its state, or its promise (where nodes are replicas, a node 0 that is
//   silent for too long ends it): the state is fetched, and ranks attach again behind that (node_member_fetch.cc).
//   Where parameters are cut over nodes a promise lasts as long as the job does, because nobody, or one other node of
//   each other row alone, could send what it is of. A node of several rows asks the nodes with its place one after the
//   other; where all of them have lost theirs, too, the job ends by name.
// Until Begin comes ranks wait, with what node 0 says of that (Recovering).

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "common/plan/node_part.h"
#include "common/plan/plan.h"
#include "server/multinode/node_coordinator.h"
#include "server/multinode/node_events.h"
#include "server/multinode/node_left.h"
#include "server/multinode/node_listeners.h"
#include "server/multinode/reached_nodes.h"
#include "server/multinode/state_search.h"
#include "server/observe/duration_histogram.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

class CoreLoop;

// Loop-confined.
class NodeMember final : public NodeEvents::Listener {
 public:
  // All outlive it. `facts`: of its job.
  NodeMember(std::shared_ptr<const ShardPlan> plan, int node, CoreLoop* loop, PeerLinks* links,
             std::shared_ptr<NodeEvents> events, const NodeFacts* facts);
  // The job has outlived the daemon before. Before Start.
  void TakeUp(NodeLeft left);
  // Until Stop, which they outlive, all `listeners` hear; to be called once, and before the job says anything.
  void Start(NodeListeners listeners);
  void Stop();  // nobody hears anything any more, and nothing is said

  // The job says:
  void Ready(v1::PeerMessage::Ready ready);
  void Closed(v1::PeerMessage::Closed closed);
  void Reduced(v1::PeerMessage::Reduced reduced);       // promised, once it is on its way; not a part of a step
  void Values(v1::PeerMessage::Values values);          // likewise
  void AsksToWrite(v1::PeerMessage::AsksToWrite asks);  // its ranks have (MayWrite); the version is told here
  // Its ranks ask to train more, or the job that does so is made; the version is told here.
  void Extends(v1::PeerMessage::Extends extends);
  void Decide(const v1::PeerMessage::Decided& decided);      // node 0
  void DecidePart(const v1::PeerMessage::Decided& decided);  // likewise: of a part of the step
  // It wants to give the attempt up and is promised.
  void WantsToEnd(const absl::Status& cause);
  // It has given the attempt up.
  void AttemptEnded(const absl::Status& cause);
  // `finished`: all its ranks have; else it is to be closed on all nodes.
  void Closing(const std::string& why, bool finished);
  // Where the state that this node has lost comes from. Who receives it says there what has come, and here that all
  // has, and that it is restored.
  StateSearch* search() { return &search_; }
  void StateCame();
  void Restored();
  bool fetching() const { return search_.under_way(); }
  // The decided step is journaled here.
  void Holding(int64_t step);
  // Why no rank may attach: the job has lost its state, which another node has, so that nothing of a rank's would
  // count; or it has a step that may not be shown yet. Else empty.
  std::string Lacking() const;
  // The last step that all nodes have held, and so no recovery can miss.
  int64_t held_step() const { return held_step_; }
  // Nobody needs this node to hear of what was decided: it may go when its ranks have finished.
  bool AllServed() const { return coordinator_ == nullptr || coordinator_->AllServed(); }

  // As far as this node would be asked for it, which sends what its slabs hold.
  bool OthersHaveState() const {
    return !fetching() && (coordinator_ == nullptr ? heard_ : !coordinator_->SomeFetch());
  }

  bool promised() const { return promised_; }
  // It is a new one without a state, has heard all nodes, and takes this one's: so nobody has made what is promised.
  void Node0AsksForState() { promised_ = promised_values_ = false; }
  // How often in this version and generation ranks may write: all nodes have asked so often (AsksToWrite).
  int may_write_times() const { return may_write_.times(); }
  // Where that let ranks into a pass (AsksToWrite.of_pass): ranks of some node have edited.
  bool pass_edited() const { return may_write_.edited(); }
  int node() const { return node_; }
  uint64_t generation() const { return generation_; }
  // This node has nothing of the job, and may still be sent the state of another node that has.
  bool MayBeSentState() const {
    if (fetching() || coordinator_ != nullptr) return fetching() || coordinator_->MayRecover();
    return generation_ == 0 || (HasRows(*plan_) && (!heard_ || search_.may_exist()));
  }
  // Every other node has said that its ranks have.
  bool OthersFinished() const;
  const ReachedNodes& reached() const { return reached_; }
  // Nodes that others wait for, and node 0 that cannot be reached.
  void CheckSilence(absl::Time now, absl::Duration limit);
  void Describe(v1::Job* out) const;
  std::string WaitText() const;  // empty: for nobody

  void OnUp(int node) override;
  void OnMessage(int node, const v1::PeerMessage& message) override;
  void OnDown(int node, const absl::Status& why) override;
  void OnRefused(int node, const absl::Status& why) override;

 private:
  void Say(v1::PeerMessage message);
  void Tell(const absl::Status& cause);
  void HearUp(int node);
  void Hear(int node, const v1::PeerMessage& message);
  void HearDown(int node, const absl::Status& why);
  void HearNode0Down(const absl::Status& why);
  void ToMember(int node, v1::PeerMessage message);  // of the coordinator
  void FromCoordinator(const v1::PeerMessage& message);
  bool AgreesOnPromised(const v1::PeerMessage::Begin& begin) const;
  void HearAgreed();
  void OnBegin(const v1::PeerMessage::Begin& begin);
  void AllHold(int64_t step);
  // (node_member_fetch.cc)
  v1::PeerMessage::Holds OwnHolds() const;
  void SayHolds(bool again);  // over the same link
  void Fetch(int from, const v1::PeerMessage::Begin& begin);
  void EndForWantOfState(absl::string_view where);
  // Of rows: does what the search comes to; returns false where that has ended the job.
  bool GoOnSearching(StateSearch::Next next);
  void HearState(int node, const v1::PeerMessage& message);
  void Recover(int from);  // of the coordinator
  void Adopt(uint64_t generation);

  const std::shared_ptr<const ShardPlan> plan_;
  const int node_;
  CoreLoop* const loop_;
  PeerLinks* const links_;
  const std::shared_ptr<NodeEvents> events_;
  const NodeFacts* const facts_;
  NodeListeners hear_;
  ReachedNodes reached_;
  std::unique_ptr<NodeCoordinator> coordinator_;  // of node 0
  const std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);

  uint64_t generation_ = 0;   // of what is said; 0: none known yet
  bool heard_ = false;        // Begin has come over the present link to node 0
  bool ended_ = false;        // the job has given the generation up
  bool told_ = false;         // node 0 knows that it has, or wants to
  bool said_ = false;         // something of the running step
  bool awaits_next_ = false;  // of a cut job: a daemon is about to be replaced, and nothing is gathered before that
  uint64_t adopting_ = 0;     // counts when the job has ended its attempt; 0: none
  bool promised_ = false;
  bool promised_values_ = false;         // of these
  bool says_part_ = false;               // what was said last: a part of the step is reduced
  v1::PeerMessage::MayWrite may_write_;  // heard in this generation, of the version that the job has
  int64_t held_step_ = 0;
  bool node0_finished_ = false;
  std::set<int> finished_;            // other nodes whose ranks have all
  v1::PeerMessage::Decided decided_;  // the last that was heard
  std::string node0_waits_;           // for whom, before it begins
  bool node0_fetches_ = false;        // before it begins
  StateSearch search_;
  std::vector<v1::PeerMessage> kept_;  // for the next generation
  absl::Time unheard_since_ = absl::InfiniteFuture();
};

}  // namespace shardd

#endif  // SHARDD_SERVER_MULTINODE_NODE_MEMBER_H_
