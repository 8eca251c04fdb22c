#ifndef SHARDD_SERVER_JOB_NODES_STATE_TRANSFERS_H_
#define SHARDD_SERVER_JOB_NODES_STATE_TRANSFERS_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/functional/any_invocable.h"
#include "common/plan/node_part.h"
#include "common/plan/plan.h"
#include "server/job/step/step_decision.h"
#include "server/job/writes/snapshot.h"
#include "server/multinode/node_fetch.h"
#include "server/multinode/node_listeners.h"
#include "server/multinode/node_member.h"
#include "server/multinode/state_senders.h"

namespace shardd {

class AskedSteps;
class Committed;
class CoreLoop;
class FullParams;
class JobControl;
class JobEvents;
class JobMemory;
class JobWork;
class OptimizerDevices;
class WriteUndo;

// A node whose daemon was lost with its slabs gets what is committed from another, a replica: shards, the optimizer's
// state, counts. Node 0 gives it to the others, and gets it from one of them where it has lost its own; of rows of
// nodes one with the same place does, which holds the same. What is sent cannot change meanwhile, because no step is
// decided without the node.
//
// Owns states on their way to other nodes, and the one that comes to this node. Loop-confined; bytes go over the
// network's threads and the worker, and keep the job alive while they are read.
class StateTransfers final : public NodeStateListener {
 public:
  struct Facts {
    const ShardPlan* plan = nullptr;
    const JobMemory* memory = nullptr;
    const StepDecision* decision = nullptr;
    const AskedSteps* steps = nullptr;
    const FullParams* full_params = nullptr;
    const WriteUndo* undo = nullptr;
    // Where trainers store into the slabs, it is sent, and what comes is the next one. Null: they do not.
    const Snapshot* snapshot = nullptr;
  };
  struct Services {
    NodeMember* member = nullptr;
    PeerLinks* links = nullptr;
    NodeEvents* bytes = nullptr;  // brings those of the state
    CoreLoop* worker = nullptr;   // reads slabs
    Committed* committed = nullptr;
    JobWork* work = nullptr;
    const OptimizerDevices* devices = nullptr;  // make what is cast of the state
    JobEvents* events = nullptr;
    JobControl* job = nullptr;
  };
  // What the job hears, on the loop.
  struct Results {
    std::function<void()> begins;    // slabs are written from elsewhere from here on
    std::function<void()> restored;  // ... and are whole, and committed
    // Runs its argument behind the trainers' values that are still being written into the slabs.
    std::function<void(absl::AnyInvocable<void()>)> behind_writes;
  };
  // All of these outlive it.
  StateTransfers(Facts facts, Services services, Results results);

  // A node waits for a state, and it can be sent: behind a commit under way, and a step that is not shown yet with it.
  bool MaySend() const {
    return senders_.waiting() && !AwaitsUpdate() && !AwaitsWord() && !use_.member->search()->has_come() &&
           !HasUncommitted();
  }
  void SendWaited();
  // All of the other node's state has come.
  bool has_come() const { return fetch_ != nullptr && fetch_->has_come() && use_.member->fetching(); }
  // ... and it is not being restored yet.
  bool MayRestore() const { return fetch_ != nullptr && fetch_->complete() && use_.member->fetching(); }
  void Restore();
  // To be called every now and then: who sends is silent where nothing more has come.
  void CheckPieces();
  // Sends nothing any more, and restores nothing.
  void Stop();

  void NodeSendState(int node, uint64_t transfer) override;
  void NodeStopSending(int node) override { senders_.Stop(node); }
  void NodeBeginFetch(int from, uint64_t transfer) override;
  void NodeTakeState(const v1::PeerMessage::State& state) override;
  void NodeTakeRankState(const v1::PeerMessage::RankState& state) override;
  void NodeEndFetch() override;

 private:
  bool two() const { return see_.snapshot != nullptr && see_.snapshot->two(); }
  bool AwaitsUpdate() const { return see_.decision->committing() && !see_.decision->applied(); }
  // Where rows of nodes are replicas: whether there is one more version than this node's is not known here. A promise
  // lasts as long as the job does, so that is what the node that asks is about to hear, or has heard.
  bool AwaitsWord() const { return HasRows(*see_.plan) && use_.member->promised(); }
  // Ranks write full parameters, in place, or parts of a step have changed them, or what was written is being taken
  // back.
  bool HasUncommitted() const;
  // `next`: of the two snapshots, the next one.
  StateSlabs Slabs(bool next) const;
  // ... and of them what this node holds.
  StateSlabs HeldSlabs(bool next) const;
  void MaybeCame();
  void Restored(const absl::Status& status, const v1::PeerMessage::State& state);

  const Facts see_;
  const Services use_;
  const Results tell_;
  StateSenders senders_;
  std::shared_ptr<NodeFetch> fetch_;  // null: none; of an earlier attempt where the member fetches nothing
  int64_t pieces_bytes_ = 0;          // of it, at the last CheckPieces
  bool stopped_ = false;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_NODES_STATE_TRANSFERS_H_
