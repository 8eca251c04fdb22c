#ifndef SHARDD_SERVER_MULTINODE_STATE_SEARCH_H_
#define SHARDD_SERVER_MULTINODE_STATE_SEARCH_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>

#include "absl/time/time.h"
#include "common/plan/plan.h"
#include "shardd/v1/peer.pb.h"

namespace shardd {

class ReachedNodes;

// The search of a node that has lost its state for a node that sends it: who is asked, what has come, and when nobody
// is left to ask. It says nothing itself: who owns it asks the node that it names (Next::kAsk).
//
// Replicas have one sender, which node 0 chooses, and search no further. Of several rows of nodes, those with the same
// place hold the same, and are asked one after the other: a node that has lost it, too, or has an older state, is asked
// once or twice (AskedTimes), and one that is silent again only where nobody else may have it. Loop-confined.
class StateSearch {
 public:
  struct State {
    bool there = false;
    int64_t step = 0;
    uint64_t version = 0;
    uint64_t generation = 0;  // in which the version was made; 0: not known
  };
  enum class Next {
    kWait,     // for what was asked for, or for a link to a node that may have it
    kAsk,      // from(), for transfer()
    kNoneHas,  // every node of the place has said so
    kSilent,   // nothing of it has come for graceMs
  };
  // Both outlive it. `node`: this one.
  StateSearch(const ShardPlan* plan, int node, const ReachedNodes* reached);

  // Another node holds the same, of several rows.
  bool IsOfPlace(int node) const;

  // What `begin` says is lost here. Replicas: `sender` is about to be asked; of rows, Ask chooses who is.
  void Begin(int sender, const v1::PeerMessage::Begin& begin);
  void End() { under_way_ = false; }
  // Of rows: node 0 has said over another link what there is. Who was asked, or has sent, may have less than that.
  Next Hear(const v1::PeerMessage::Begin& begin, absl::Time now);
  // Of replicas: what counts when the state is there is this one, or later.
  void CountFrom(uint64_t generation);
  // Of rows: the next of those that may have it, which have a link.
  Next Ask(absl::Time now);
  // Who was asked before, has a link, and is to be told that it is not any more; -1: nobody.
  int TakePassedOver();
  void OnUp(int node);
  // Returns whether Ask is to follow: the node was asked, and has not sent all.
  bool OnDown(int node);
  // To be called every now and then. `limit`: how long one node may be silent.
  Next CheckSilence(absl::Time now, absl::Duration limit);

  // The node was asked, and what it says is awaited.
  bool Awaits(int node) const { return under_way_ && node == from_; }
  // Of rows: it belongs to another transfer than the one under way.
  bool IsStale(const v1::PeerMessage::State& state) const;
  // Of rows: the node that was asked sends no state, or an older one than node 0 has said there is, or one of another
  // attempt. Ask is to follow.
  bool Lacks(const v1::PeerMessage::State& state);
  // Of rows: what has come is nothing that the others go on from. Ask is to follow.
  void CountAsNone();
  // The node that was asked begins to send this one.
  void Takes(const v1::PeerMessage::State& state, absl::Time now);
  // More of it has come.
  void Comes(absl::Time now);
  // All of it has come, which is of this step and version, made in that attempt (0: its sender does not say). Of rows,
  // it counts as what the node has from here on, and needs nobody any more.
  void Came(int64_t step, uint64_t version, uint64_t generation = 0);

  bool under_way() const { return under_way_; }
  // Which node was asked; -1: none of those that may have it has a link.
  int from() const { return from_; }
  uint64_t transfer() const { return transfer_; }
  // Nothing is searched yet, and node 0, which has begun with nothing, has not heard all nodes: one may have it.
  bool may_exist() const { return may_exist_; }
  void SetMayExist(bool may_exist) { may_exist_ = may_exist; }
  // What counts when the state is there; of node 0 of replicas, the next one does.
  uint64_t generation() const { return generation_; }
  // Node 0 has said over its last link that there is a state.
  bool wanted() const { return wanted_; }
  // Of rows: all has come, and is not restored yet.
  bool has_come() const;
  const State& came() const { return came_; }
  // Of rows: what has come is of a step that node 0, which has heard all nodes, does not count.
  bool is_ahead() const {
    return has_come() && wanted_ && (version_ > 0 ? came_.version > version_ : came_.step > step_);
  }
  // "the node's state is being brought from ..."
  std::string Text() const;
  // Behind kNoneHas and kSilent: where it has been, and why it does not come from there.
  std::string WhereItWas(Next why) const;

 private:
  int NextOfPlace() const;
  void BeginTransfer();
  // It is less than what node 0 has said there is, or was made in another attempt.
  bool IsLess(const State& state) const;
  // The others of the place, or those of them in `only`.
  std::string Names(const std::set<int>* only) const;
  // How often a node is asked before it counts as one without the state.
  int AskedTimes() const;

  const ShardPlan* const plan_;
  const int node_;
  const ReachedNodes* const reached_;
  bool under_way_ = false;
  int from_ = 0;
  int passed_over_ = -1;
  uint64_t transfer_ = 0;
  uint64_t generation_ = 0;
  // Of several rows:
  int64_t step_ = 0;      // that node 0 has said, and version; what comes is not behind
  uint64_t version_ = 0;  // 0: not known
  uint64_t version_generation_ = 0;
  bool wanted_ = true;
  bool may_exist_ = false;
  bool all_here_ = false;
  State came_;                   // or comes
  std::map<int, int> had_none_;  // how often nodes have said so, over the links that all have
  std::set<int> silent_;         // that others were asked instead of
  absl::Time asked_since_ = absl::InfiniteFuture();
  absl::Time unanswered_since_ = absl::InfiniteFuture();  // by any of them
};

}  // namespace shardd

#endif  // SHARDD_SERVER_MULTINODE_STATE_SEARCH_H_
