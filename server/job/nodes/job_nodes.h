#ifndef SHARDD_SERVER_JOB_NODES_JOB_NODES_H_
#define SHARDD_SERVER_JOB_NODES_JOB_NODES_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/plan/plan.h"
#include "server/job/job_part.h"
#include "server/job/membership/leavers.h"
#include "server/job/nodes/other_daemons.h"
#include "server/job/nodes/steps_over_nodes.h"
#include "server/job/nodes/sums_over_nodes.h"
#include "server/multinode/backwards.h"
#include "server/multinode/node_left.h"
#include "server/multinode/node_listeners.h"
#include "server/observe/duration_histogram.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

class AskedSteps;
class Committed;
class CoreLoop;
class FullParams;
class JobEvents;
class JobMemory;
class JobWork;
class ModelDigests;
class NodeCollective;
class NodeEvents;
class NodeGather;
class NodeGathers;
class NodeMember;
class OptimizerDevices;
class PeerLinks;
class SnapshotKeeper;
class StateTransfers;
class ValueWrites;

// What is made for a job over several nodes when it is opened (core_nodes.cc).
struct NodeParts {
  int node = 0;
  std::shared_ptr<NodeEvents> events;
  std::unique_ptr<PeerLinks> links;      // of `events`; used by the exchange of `collective`
  NodeCollective* collective = nullptr;  // the job's
  std::unique_ptr<NodeGather> gather;    // where parameters are cut over nodes, else null; uses `links` and slabs
  CoreLoop* worker = nullptr;            // reads initial values
  std::optional<NodeLeft> left;          // by the daemon before, which the job has outlived
  std::string link_key = {};             // JobSecret::LinkKey
  ~NodeParts();
};

// A job's other nodes. A job on one node has none; each question below has an answer for it, too.
//
// Owns the links to them, this node's part in what all decide (NodeMember), what is exchanged, by what it is (sums,
// steps, states, digests, gathers), and whether the others know that this node's ranks have finished. Hears when
// attempts end. Loop-confined.
class JobNodes final : public JobPart, private NodeFacts, private NodeAttemptsListener {
 public:
  struct Facts {
    std::shared_ptr<const ShardPlan> plan;
    const JobMemory* memory = nullptr;
    const StepDecision* decision = nullptr;
    const AskedSteps* steps = nullptr;
    const Leavers* leavers = nullptr;
    const OptimizerDevices* devices = nullptr;
    const FullParams* full_params = nullptr;
  };
  struct Services {
    Committed* committed = nullptr;
    const Pairing* pairing = nullptr;
    GradientPresence* presence = nullptr;
    ValueWrites* values = nullptr;
    SnapshotKeeper* snapshots = nullptr;
    JobWork* work = nullptr;
    JobEvents* events = nullptr;
    JobControl* job = nullptr;
  };
  struct Results {
    SumsOverNodes::Add add;
    StepsOverNodes::Results steps;
    std::function<void(const absl::Status& cause)> end_attempt;  // all nodes do, whatever this one has promised
    std::function<bool(bool made)> extend;  // as NodesExtend; false: this node is in no state to, and nothing happens
  };
  // All outlive it. Takes links, events and the gather out of `parts`; null: the job is on one node.
  JobNodes(NodeParts* parts, const Facts& facts, const Services& services, Results results);
  ~JobNodes();
  // Hears of the others from here on. To be called once.
  void Start();
  // Nothing reaches exchanges any more, which may then go; they go before this, which ends the links.
  void ForgetExchange();

  bool over_nodes() const { return member_ != nullptr; }
  int node() const;
  // Of the running step, how many backwards all nodes have closed; on one node every rank decides it.
  int closed() const;
  // This node gives nothing up by itself: the step may be decided already.
  bool promised() const;
  // The last step that all nodes hold, so that ranks may be shown it.
  int64_t held_step() const;
  // All nodes have closed the step, and what is to be compared with it is there.
  bool MayDecide() const;
  // Ranks that have entered a pass without a step may be said to have. REQUIRES: over_nodes().
  bool MaySayPass() const;
  // Nobody gathers what lies here before there is another version.
  void StopReading() { SetReadable(0); }
  // All ranks have entered a pass without a step, and what they have stored is kept. `trainer_states`: what they keep
  // with it, by rank; empty: as before.
  void SayPass(std::vector<std::string> trainer_states);
  // The state is brought from another node.
  bool fetching() const;
  // This node has nothing of the job, and may still be sent the state of another node that has.
  bool MayBeSentState() const;
  // All of this node's ranks have finished, and no other node needs it; else: it serves the others.
  bool finished() const;
  bool ServesOthers() const { return gathers_ != nullptr && see_.leavers->all_finished() && !finished(); }
  // What those wait for whom no rank of this node lets wait; empty: for nobody.
  std::string WaitText() const;
  void Describe(v1::Job* out) const;

  // REQUIRES of these: over_nodes().
  SumsOverNodes& sums() { return *sums_; }
  const SumsOverNodes& sums() const { return *sums_; }
  StepsOverNodes& steps() { return *steps_; }
  StateTransfers& states() { return *states_; }
  const StateTransfers& states() const { return *states_; }
  const OtherDaemons& others() const { return others_; }
  uint64_t generation() const;
  // Null where nothing is cut over nodes.
  NodeGathers* gathers() const { return gathers_.get(); }

  // Ranks that ask may write values: no other node is being sent what they would change, or reads it.
  bool MayWriteBack() const;
  // Where parameters are cut over nodes the others are asked first, because they gather them: all are let in when all
  // have asked. REQUIRES: nothing of the version is being gathered here.
  bool MayAskToWrite() const;
  void AskToWrite();
  // Where parameters are cut over nodes and trainers edit them, all ranks of all nodes enter a pass together: nobody
  // enters before every node has said whether its ranks have edited.
  bool MaySayEntering() const;
  void SayEntering(bool edited);
  bool MayEnterPass() const;
  // All ranks of this node enter now. `edited`: some of them have edited. Returns whether some of any node have, whose
  // values the pass would read.
  bool EnterPass(bool edited);
  // Nobody gathers what lies here from now on, until there is another version or what was written, or parts of a step
  // have changed, is taken back.
  void BeginWriting();
  void EndWriting();

  // Values are asked to be committed, which they are when all nodes have the same.
  void SayValues();
  // The decision is journaled here, and shards are about to change. REQUIRES: over_nodes().
  void SayDecided();
  void StepCommitted() override;
  void VersionCommitted() override;
  absl::Status CheckMayBegin(const std::string& what) override;
  void EndEpoch() override;
  // The attempt is to end, and has been promised.
  void WantsToEnd(const absl::Status& cause);
  // The epoch has ended here.
  void AttemptEnded(const absl::Status& cause);
  // Where parameters are cut over nodes, the others need this one until they have finished, too.
  bool MaySayFinished() const { return gathers_ != nullptr && !finished_said_ && see_.leavers->all_finished(); }
  void SayFinished();
  // Nodes that others wait for, gathers that take too long, and nodes that are not reached. What it finds it tells.
  void CheckSilence(absl::Time now);
  // The job has ended here; with `everywhere` on all nodes. Says nothing any more, and hears nothing. It `goes_on` with
  // the next daemon of this node: the others hear only that the link is gone.
  struct Closing {
    bool everywhere = false;
    bool goes_on = false;
  };
  void Close(const std::string& why, const Closing& closing);

 private:
  int64_t NodeStep() const override;
  uint64_t NodeVersion() const override;
  uint64_t NodeVersionGeneration() const override;
  bool NodeInitialized() const override;
  void NodeAbort(const absl::Status& cause) override { tell_.end_attempt(cause); }
  void NodeGeneration(uint64_t generation) override;
  void NodeIsUp() override;
  void NodesExtend(bool made) override;
  void NodeClose(const std::string& why) override { use_.job->Close(why); }
  void Advance() override { use_.job->Advance(); }
  // The other nodes may gather the parameters of this version; 0: of none.
  void SetReadable(uint64_t version);
  // With an optimizer in the trainers: what is written is kept before it is said.
  void TakeNext(std::function<void()> then);

  const Facts see_;
  const Services use_;
  const Results tell_;
  NodeCollective* const collective_;
  // All null on one node.
  const std::shared_ptr<NodeEvents> events_;
  const std::unique_ptr<PeerLinks> links_;
  const OtherDaemons others_;
  std::unique_ptr<NodeMember> member_;
  std::unique_ptr<ModelDigests> digests_;
  std::unique_ptr<SumsOverNodes> sums_;
  std::unique_ptr<StepsOverNodes> steps_;
  std::unique_ptr<StateTransfers> states_;
  std::unique_ptr<NodeGathers> gathers_;
  std::optional<NodeLeft> left_;  // until Start
  bool finished_said_ = false;    // that all ranks have, over the links that are there
  // Where parameters are cut over nodes:
  absl::Time others_needed_since_ = absl::InfiniteFuture();
  bool asks_to_write_ = false;  // all ranks, and this node has said so
  bool says_entering_ = false;  // likewise
  int asked_to_write_ = 0;      // how often in this version and generation
  bool writing_ = false;        // what ranks write, or had written, is neither a version nor taken back
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_NODES_JOB_NODES_H_
