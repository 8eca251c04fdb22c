#ifndef SHARDD_SERVER_JOB_GRADIENTS_REDUCTIONS_H_
#define SHARDD_SERVER_JOB_GRADIENTS_REDUCTIONS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "common/plan/plan.h"
#include "server/collective/collective.h"
#include "server/job/gradients/pairing.h"
#include "server/job/work/given_back.h"
#include "server/job/work/optimizer_devices.h"
#include "server/observe/duration_histogram.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

class AskedSteps;
class Committed;
class CoreLoop;
class Device;
struct GivenGradients;
class JobControl;
class JobMemory;
class JobTrace;
class JobWork;
struct SessionMemory;
class Sessions;
class TrainerWrites;

// Adds gradients: an occurrence of a group in a backward at a time, when every rank has given its part or none. Owns
// which reductions are under way, and of which backwards ranks were told; tells ranks in their pages. Loop-confined. A
// method that returns an error leaves it to the caller to end the epoch.
class Reductions {
 public:
  struct Facts {
    const Committed* committed = nullptr;
    const Sessions* sessions = nullptr;  // of which this writes the words of slots and backwards
    const AskedSteps* steps = nullptr;
    const TrainerWrites* writes = nullptr;
    const JobMemory* memory = nullptr;
    const std::vector<Device*>* devices = nullptr;  // by rank
    bool of_the_daemons_user = false;               // the job
  };
  struct Services {
    Collective* collective = nullptr;
    GivenBack* given_back = nullptr;  // waits for the devices that write what is added
    PollTimer* poll_timer = nullptr;  // is on while trainers add
    JobWork* work = nullptr;
    JobTrace* trace = nullptr;
    v1::Counters* counters = nullptr;
    CoreLoop* reaper = nullptr;  // frees what holds the memory of sessions
    JobControl* job = nullptr;
  };
  // The ranks of other nodes give to the same sums.
  struct OverNodes {
    std::function<void(PairKey, const Pairing::Said&)> say_ready;  // this node's part is complete
    std::function<int()> closed;                                   // how many backwards all nodes have closed
    std::function<uint64_t()> generation;                          // the nodes' attempt at the step
  };
  // All outlive this. `pairing` decides what is added; this takes from it what it adds.
  Reductions(std::shared_ptr<const ShardPlan> plan, Facts facts, Services services, Pairing* pairing);
  // Before anything else.
  void AddOverNodes(OverNodes nodes) { nodes_ = std::move(nodes); }

  bool under_way() const { return under_way_ > 0; }
  bool over_nodes() const { return nodes_.say_ready != nullptr; }
  // How long each took, from its submission to the collective.
  const DurationHistogram& durations() const { return durations_; }

  // Adds what of the pair is complete; over several nodes, says so, and AddGiven goes on.
  absl::Status AddComplete(PairKey key);
  // The rank has closed what `keys` name: adds what is complete by that.
  absl::Status AddClosed(int rank, const std::vector<PairKey>& keys);
  // All nodes, this one too, have given their parts of the occurrence: `given`, together.
  absl::Status AddGiven(PairKey key, int occurrence, const GivenGradients& given);
  // Ranks that run groups in different orders have come to hold each other up: each sleeps until a slot is released
  // whose group another rank submits only later. Such a state is reached whatever the timing.
  bool AllStuck() const;
  absl::Status AddBeforeTurn();

  // Ranks have closed backwards of which they were not told that all is under way, or all is added.
  bool OwesWord() const;
  void Publish();

  // What devices do, by rank, before gradients are read that some ranks have and others have not.
  DeviceOps SettleAll();
  // What the rank has in the slot is not added.
  void DropSlot(int rank, int slot);

  void EndStep() { told_under_way_ = told_added_ = 0; }
  // Of reductions that are still under way, nothing happens any more where they end.
  void EndEpoch();

 private:
  // All that the daemon's devices are told of one reduction.
  struct Reduction {
    int group = 0;
    std::vector<int> ranks;
    std::vector<bool> stream_ordered;  // by `ranks`
    DeviceOps zeros;
    ReduceScatterRequest request;
    std::vector<std::shared_ptr<SessionMemory>> keep;  // slots are read until it is done, whatever happens meanwhile
  };
  int world_size() const { return plan_->world_size; }
  const std::string& group_name(int group) const { return plan_->groups[static_cast<size_t>(group)].name; }
  bool by_trainers() const { return use_.collective->trainers() != nullptr; }
  int closed() const;  // backwards, by all
  // `by_nodes`: what all nodes give; null: there is one node.
  absl::Status Issue(PairKey key, const std::vector<int>& ranks, const GivenGradients* by_nodes);
  ReduceScatterRequest RequestOf(PairKey key, const GivenGradients* by_nodes) const;
  std::vector<DoneSignal> SignalsOf(PairKey key, const std::vector<int>& ranks,
                                    const std::vector<Contribution>& given) const;
  void Submit(Reduction reduction);
  // The daemon has come to read the slot; where the rank's device says when the next bytes are in it, the next may
  // come.
  void IssueSlot(int rank, int slot, bool stream_ordered);
  void ReleaseSlot(int rank, int slot, bool stream_ordered);

  const std::shared_ptr<const ShardPlan> plan_;
  const Facts see_;
  const Services use_;
  Pairing* const pairing_;
  const float scale_;
  OverNodes nodes_;  // empty: there is one node
  int under_way_ = 0;
  DurationHistogram durations_;
  // Backwards of the step of which ranks were told: that all is under way, that all is added.
  int told_under_way_ = 0;
  int told_added_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_GRADIENTS_REDUCTIONS_H_
