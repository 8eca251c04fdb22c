#ifndef SHARDD_TESTS_SERVER_MULTINODE_NODE_WORLD_H_
#define SHARDD_TESTS_SERVER_MULTINODE_NODE_WORLD_H_

// The nodes of one job on one loop, with links in memory that lose what is under way, break and return, daemons that
// are lost and come anew, with nothing or with what a custodian has kept, and jobs that behave towards their NodeMember
// as JobCore does: all at random moments, the same for the same seed.

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"
#include "server/job/advance.h"
#include "server/loop/core_loop.h"
#include "server/multinode/node_member.h"
#include "tests/common/plan/spec_builder.h"

namespace shardd::testing {

// Three groups, of two, one and one parameters. `row`: nodes over which shard groups span; 0: none.
inline std::shared_ptr<const ShardPlan> NodesPlan(int nodes, bool allow_missing, bool cut = false, int row = 0) {
  SpecBuilder b(1);
  b.config().set_strategy(cut && row == 0 ? v1::STRATEGY_FULL_SHARD : v1::STRATEGY_HYBRID_SHARD);
  b.config().set_shard_group_size(row);
  b.config().mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
  b.config().set_allow_missing_contribution(allow_missing);
  if (row > 0) b.config().set_grace_ms(absl::ToInt64Milliseconds(absl::Hours(48)));  // longer than any silence here
  for (int node = 0; node < nodes; ++node) {
    b.config().mutable_nodes()->add_addresses(absl::StrCat("host", node, ":7000"));
  }
  b.Param(0, "w", {64});
  b.Param(0, "bias", {8});
  b.Param(b.AddSharded(0, "a"), "w", {32});
  b.Param(b.AddSharded(0, "b"), "w", {16});
  return std::make_shared<const ShardPlan>(b.Plan());
}

class NodeWorld;

// What JobCore is to its member. Its step: backwards, in each some groups once or twice, in an order of its own; then
// up to two parts, of several optimizers.
class RandomJob final : public NodeFacts,
                        public NodeSumsListener,
                        public NodeStepsListener,
                        public NodeStateListener,
                        public NodeAttemptsListener {
 public:
  RandomJob(NodeWorld* world, int node) : world_(world), node_(node) {}
  void Act();  // the next thing that it does; nothing where it waits
  void Abort(const absl::Status& cause);
  void Finish();
  // The daemon of `before` is killed, and this is what its successor makes of what it has left; to be called once there
  // is a member, which has not started.
  void TakeUp(const RandomJob& before);
  // Likewise where it trains more, and takes the place of `before`, which is between two steps.
  void TakePlaceOf(const RandomJob& before, int trains);
  bool InTheMiddle() const { return committing_ || said_reduced_ || member->promised() || member->fetching(); }
  // What it has is what its machine keeps: of a version, and of what it has promised, or made and not shown, behind
  // that.
  bool MayBeCutOff() const { return initialized && !(committing_ && loads_) && !member->fetching(); }
  std::string Text() const;
  int fetches_from() const { return member->fetching() ? fetches_from_ : -1; }
  // All of its state has come, and is not restored yet.
  bool casts() const { return member->search()->has_come(); }
  bool has_promised() const { return said_reduced_ && !says_part_ && node_ != 0; }
  bool has_promised_load() const { return said_values_ && loads_ && !committing_; }
  bool has_unshown() const { return committing_; }
  // The last piece of a state has come, which the network's thread has told the loop.
  void PiecesCame(int from, uint64_t transfer);
  // What it holds is the last that nodes have committed, as far as it is not about to hear of one more.
  bool has_all() const { return (initialized && !older) || casts(); }

  NodeMember* member = nullptr;
  int64_t step = 0;
  bool initialized = false;
  bool stopped = false;
  bool older = false;     // what it holds was kept on a machine that was cut off and replaced
  int trains = 0;         // more than at first: how often its ranks have asked for that
  int becomes = 0;        // what it is to train as others do, and cannot yet; 0: nothing
  bool replaced = false;  // all nodes have made what trains more, and here it is about to take this one's place
  int aborts = 0;
  std::vector<std::string> commits;

  int64_t NodeStep() const override { return step + (committing_ && initialized && !loads_ ? 1 : 0); }
  bool NodeInitialized() const override { return initialized || committing_; }
  uint64_t NodeVersion() const override {  // its initial values, steps and loads
    return NodeInitialized() ? commits.size() + (committing_ ? 1 : 0) : 0;
  }
  uint64_t NodeVersionGeneration() const override { return committing_ ? makes_in_ : made_in_; }
  void NodeGo(const v1::PeerMessage::Go& go) override;
  void NodesClosed(int backwards) override;
  void NodesReduced(const std::vector<v1::PeerMessage::Reduced>& reduced) override;
  void NodeDecided(const v1::PeerMessage::Decided& decided) override;
  void NodeValuesAgreed() override;
  void NodeIsUp() override;
  void NodesExtend(bool made) override;
  void NodeAbort(const absl::Status& cause) override;
  void NodeGeneration(uint64_t generation) override;
  void NodeClose(const std::string& why) override;
  void Advance() override { MaybeShow(); }
  // The state is `commits`, which goes with the trainer state of rank 0.
  void NodeSendState(int node, uint64_t transfer) override;
  void NodeStopSending(int node) override;
  void NodeBeginFetch(int from, uint64_t transfer) override;
  void NodeTakeState(const v1::PeerMessage::State& state) override;
  void NodeTakeRankState(const v1::PeerMessage::RankState& state) override;
  void NodeEndFetch() override { ForgetFetch(); }

 private:
  struct Give {
    int group = 0;
    int times = 1;
  };
  void BeginAttempt();
  // Before some steps all load values: ranks that attach again do not know that they have, and do it anew.
  bool MustLoad() const;
  void LoadNext();
  // Behind some steps all train more, once.
  bool MustExtend() const;
  void ExtendNext();
  std::string StepShown() const;  // the commit of `step`
  void GiveNext();
  void ForgetFetch();
  void MaybeCame();
  void FinishRestore();
  bool AwaitsWord() const;  // it may not say yet what is committed, or it cannot
  void SendWaited();
  void MakePart();
  bool MayShow() const { return !initialized || loads_ || member->held_step() > step; }
  void MaybeShow();
  void EndCommit();
  std::string CommitText() const;

  NodeWorld* const world_;
  const int node_;
  bool committing_ = false;
  bool applied_ = false;  // and not shown
  bool ranks_finished_ = false;
  std::optional<absl::Status> pending_abort_;
  uint64_t last_generation_ = 0;
  std::map<int, uint64_t> wait_for_state_;  // behind a commit
  uint64_t transfer_ = 0;
  int fetches_from_ = -1;
  std::vector<std::string> commits_before_;  // it was sent the state
  std::vector<std::string> commits_sent_;
  std::optional<v1::PeerMessage::State> state_sent_;
  bool pieces_here_ = false;
  uint64_t made_in_ = 0;   // the generation of the last commit
  uint64_t makes_in_ = 0;  // of the one under way
  // Of the attempt:
  bool begun_ = false;
  bool said_values_ = false;
  bool asks_to_write_ = false;
  int asked_to_write_ = 0;  // how often
  bool loaded_ = false;     // its ranks have, before the next step
  bool loads_ = false;      // what is committed, or promised, is no step and not the initial values
  uint64_t loads_in_ = 0;   // the generation
  enum class Extends { kNo, kAsked, kMakes, kMade } extends_ = Extends::kNo;
  bool said_reduced_ = false;
  int parts_ = 0;           // of the step, made in this attempt
  int parts_wanted_ = 0;    // before the one that commits it
  bool says_part_ = false;  // what it has said to be reduced
  bool leaves_ = false;     // with the end of this attempt, which it has asked for
  int reduced_in_life_ = 0;
  int backwards_ = 0;
  int backward_ = 0;
  std::vector<Give> to_give_;  // in this backward
  int closed_ = 0;             // by all
  bool said_all_ = false;
  std::map<std::pair<int, int>, int> waits_;  // by (backward, group): the occurrence that was said and not added
  uint64_t promised_in_ = 0;                  // the generation
  std::string added_;                         // sums, in order
  uint64_t added_in_ = 0;                     // the generation
  v1::PeerMessage::Decided decided_;
};

class NodeWorld {
 public:
  struct Options {
    bool daemons_die = false;  // trouble is also that
    bool custodians = false;   // every second daemon that dies leaves what it had; where parameters are cut, each
    bool cut = false;          // parameters are cut over the nodes, so that nobody is sent any
    int row = 0;               // over so many, and the rows are replicas of each other; 0: over all
    bool extends = false;      // more is trained behind some steps
    bool rows_lose = false;    // of rows, every second daemon that dies leaves nothing, if another node has the same
    bool twice = false;        // ... also who has just sent what it had to another, or a successor has older things
  };
  NodeWorld(int nodes, uint64_t seed, bool allow_missing, Options options);
  ~NodeWorld();

  // Empty: `events` of trouble, and then without trouble every node trains to a common step and finishes.
  std::string Run(int events);

  // For jobs and links.
  void Fail(const std::string& what);
  int Random(int below) { return static_cast<int>(rng_() % static_cast<uint64_t>(below)); }
  void Send(int from, int to, v1::PeerMessage message);
  // The bytes of slabs, over a stream of their own.
  void SendPieces(int from, int to, uint64_t transfer);
  void StopPieces(int from, int to);
  void Added(int node, uint64_t generation, const v1::PeerMessage::Go& go);
  // It has nothing any more of what is committed, until it is sent it.
  void Lose(int node);
  void Restored(int node, int from, int64_t step);
  int PlaceOf(int node) const { return options_.row > 0 ? node % options_.row : 0; }
  bool of_rows() const { return options_.row > 0; }
  const ShardPlan& plan() const { return *plan_; }
  int64_t target() const { return target_; }
  uint64_t seed() const { return seed_; }
  // What jobs must train more at a step, which is the same on all nodes.
  int TrainsAt(int64_t step) const;
  bool calm() const { return target_ > 0; }
  // Behind Run: how often a node was sent a state, and by a node other than 0.
  int restored() const { return restored_; }
  int restored_by_others() const { return restored_by_others_; }
  // ... how often one was told that the node asked has lost its own, and asked another instead of one that was lost.
  int had_none() const { return had_none_; }
  int asked_again() const { return asked_again_; }
  void HadNone() { ++had_none_; }
  void AskedAgain() { ++asked_again_; }
  // ... how often who had sent a state was lost before that was restored, node 0 with it or beside; and how often a
  // successor had what another machine had kept, of node 0 too.
  int lost_twice() const { return lost_twice_; }
  int came_older() const { return came_older_; }
  // ... and how often with a promise of a step, which others may have made without it.
  int promised_came() const { return promised_came_; }
  int promised_loads_came() const { return promised_loads_came_; }
  // ... and how often with a step that it had made, and the others had made anew; how often what had come whole was
  // told behind the end of its sender's link; and a step was lost with all that had heard of it.
  int made_came() const { return made_came_; }
  int pieces_behind_end() const { return pieces_behind_end_; }
  int decisions_lost() const { return decisions_lost_; }
  int node0_came_older() const { return node0_came_older_; }
  // How often node 0 was sent a state with a step, and a decided step was taken from it that its earlier
  // daemon had decided.
  int recoveries() const { return recoveries_; }
  int carried_over() const { return carried_over_; }
  // How often a daemon was killed that left what it had, and with a step that it had promised.
  int taken_up() const { return taken_up_; }
  int promises_taken_up() const { return promises_taken_up_; }
  void TookUp(bool promised, bool loads) {
    ++taken_up_;
    promises_taken_up_ += promised && !loads ? 1 : 0;
    loads_taken_up_ += loads ? 1 : 0;
  }
  // Likewise with values that it had promised; and how often such values were found to be agreed on then.
  int loads_taken_up() const { return loads_taken_up_; }
  int loads_carried_over() const { return loads_carried_over_; }
  void CarriedLoadOver() { ++loads_carried_over_; }
  // Ranks of the node see the step as committed. As long as a daemon lives that was there when it was decided, no other
  // such step may be made.
  void Shown(int node, int64_t step, const std::string& commit);
  // Its daemon may die behind that, when some nodes have heard of it.
  void Node0Decides(int64_t step) {
    for (const Node& node : nodes_) decided_by_[step].insert(node.daemon);
    node0_dies_ = options_.daemons_die && !calm() && Random(8) == 0;
    if (options_.twice && !calm() && !node0_dies_ && Random(6) == 0) CutOffDecision(step);
  }
  // How many daemons of node 0 have ended. A step is decided that was reduced so long ago.
  int life() const { return life_; }
  // Parts of steps that nodes have made, each on each of them.
  void MadePart() { ++parts_made_; }
  int parts_made() const { return parts_made_; }
  // The daemon of the node is replaced by one that goes on where it was.
  void Leave(int node);
  // How often an attempt has ended where a node showed a step, because a daemon was about to be replaced.
  void EndedBehindStep() { ++ended_behind_step_; }
  int ended_behind_step() const { return ended_behind_step_; }
  // How often a job that trains more took another's place, and how often because it had missed what the others had
  // heard.
  int extended() const { return extended_; }
  int widened() const { return widened_; }
  void Decided(int reduced_in_life) { carried_over_ += delivers_begin_ && reduced_in_life < life_ ? 1 : 0; }

 private:
  struct Event {
    enum class Kind { kUp, kMessage, kDown } kind = Kind::kUp;
    v1::PeerMessage message;
  };
  struct Pieces {
    int from = 0;
    uint64_t transfer = 0;
    bool taken = false;  // by the network's thread, before its link ended
  };
  struct Node {
    int daemon = 0;  // a number of its own for each
    std::unique_ptr<PeerLinks> links;
    std::shared_ptr<NodeEvents> events;
    std::unique_ptr<RandomJob> job;
    std::unique_ptr<NodeMember> member;
    std::unique_ptr<RandomJob> cut_off;      // what a machine in its place has kept that was replaced
    std::map<int, std::deque<Event>> comes;  // by sender
    std::deque<Pieces> pieces;               // all of a state, which have come or come
    std::map<uint64_t, size_t> added;        // by generation: how many sums
  };
  void MakeNode(int node);
  void Start(int node);
  void Kill(int node, bool leaves_nothing = false);
  // A machine that was cut off, as it has made nothing that no other node has; with what others have made without it.
  bool MayReturn(int node) const;
  bool HasOther(int node) const;
  // A step is decided of which some nodes do not hear, and then those that do are lost.
  void CutOffDecision(int64_t step);
  void LoseDecision();
  bool MayKill(int node);
  bool OthersHave(int node) const;    // another node has what it holds
  int Promised(int otherwise) const;  // a node that has promised a step
  int Sender(int otherwise) const;    // a node that another has asked for its state
  int Casting() const;                // a node that has been sent all of its state; -1: none
  void Turn();
  bool Deliver(int node);
  void DeliverPieces(int node);
  void Break(int a, int b, bool loses);
  void Make(int a, int b);
  // Whether their jobs are the same, as SameJob has it: one that trains less becomes what the other is.
  bool Meet(int a, int b);
  void TakePlace(int node, int trains);
  void ForgetSums();
  bool& Linked(int a, int b) { return linked_[{std::min(a, b), std::max(a, b)}]; }
  void Trouble();
  void CalmDown();
  void MakeAll();  // links
  bool Ended() const;

  const uint64_t seed_;
  const Options options_;
  std::mt19937_64 rng_;
  const std::shared_ptr<const ShardPlan> plan_;
  std::vector<Node> nodes_;
  std::map<std::pair<int, int>, bool> linked_;
  std::map<uint64_t, std::vector<std::string>> added_;  // by generation
  struct Commit {
    std::string text;
    std::set<int> daemons;  // that live and were there when it was decided
  };
  std::map<int64_t, Commit> shown_;              // by step
  std::map<int64_t, std::set<int>> decided_by_;  // daemons that were there
  int daemons_made_ = 0;
  std::string failure_;
  bool all_had_values_ = false;  // at one time
  int restored_ = 0;
  int restored_by_others_ = 0;
  int had_none_ = 0;
  int asked_again_ = 0;
  int lost_twice_ = 0;
  int came_older_ = 0;
  int node0_came_older_ = 0;
  int promised_came_ = 0;
  int promised_loads_came_ = 0;
  int made_came_ = 0;
  int pieces_behind_end_ = 0;
  int decisions_lost_ = 0;
  int recoveries_ = 0;
  int ended_behind_step_ = 0;
  int extended_ = 0;
  int widened_ = 0;
  int carried_over_ = 0;
  int taken_up_ = 0;
  int promises_taken_up_ = 0;
  int loads_taken_up_ = 0;
  int loads_carried_over_ = 0;
  int life_ = 0;
  int parts_made_ = 0;
  bool delivers_begin_ = false;
  bool node0_dies_ = false;
  int64_t cut_off_step_ = 0;  // that some have not heard of
  int lost_in_ = 0;           // so many events; 0: it is not
  int64_t target_ = 0;        // 0: there is trouble still
  int left_ = 0;              // events
  absl::Notification ended_;
  CoreLoop loop_;  // last: ends first
};

}  // namespace shardd::testing

#endif  // SHARDD_TESTS_SERVER_MULTINODE_NODE_WORLD_H_
