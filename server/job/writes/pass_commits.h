#ifndef SHARDD_SERVER_JOB_WRITES_PASS_COMMITS_H_
#define SHARDD_SERVER_JOB_WRITES_PASS_COMMITS_H_

#include <functional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/plan/plan.h"
#include "server/job/work/given_back.h"
#include "server/job/writes/trainer_writes.h"
#include "server/session/rank_command.h"

namespace shardd {

class Commits;
class JobMemory;
class JobWork;
class SnapshotKeeper;
class Summons;
class Unsharding;

// Jobs whose trainers write: what ranks wrote before a pass becomes the next version where the pass begins, and they
// are let in to hand in what they wrote, or to store. What allows each is TrainerWrites' to say. A rank that dies in
// between leaves torn shards, and the job goes back to the snapshot.
//
// With pass_copies devices make copies where a pass begins, when those of all ranks have done with what they have
// stored, and with what they have read of the copies before. Nobody hands in then: ranks store into the shards at any
// time outside of EnterPass, and of full parameters, which are the shards themselves.
//
// Has no state of its own. Loop-confined. A method that returns an error leaves it to the caller to end the epoch.
class PassCommits {
 public:
  using SayPass = std::function<void(std::vector<std::string> trainer_states)>;
  // All outlive this.
  struct Services {
    const ShardPlan* plan = nullptr;
    const JobMemory* memory = nullptr;
    TrainerWrites* writes = nullptr;
    Committed* committed = nullptr;
    Commits* commits = nullptr;
    SnapshotKeeper* snapshots = nullptr;
    Unsharding* unsharding = nullptr;
    Summons* summons = nullptr;
    GivenBack* given_back = nullptr;
    JobWork* work = nullptr;
    // Over nodes: says to the others that all ranks have entered without a step, and what they keep, by rank (empty: as
    // before). Null: the job is on one node.
    SayPass say_pass = nullptr;
  };
  explicit PassCommits(Services services) : use_(std::move(services)) {}

  absl::Status Enter(int rank, RankCommand command);
  // All ranks enter. Makes what they wrote a version, or, where they wrote nothing, lets them in at once. `edited`:
  // over nodes, ranks are to write edits back.
  absl::Status Commit(bool edited = false);
  // With pass_copies, before Commit. `tell`: the ranks' streams may go on to what reads the copies; else ranks wait
  // for the copies.
  absl::Status Announce(bool tell);
  // With pass_copies: commits when the ranks' devices have done with what they did before.
  absl::Status CommitBehindDevices();
  // Over nodes: all of them have entered without a step, and what they have stored is a version.
  void Agreed();
  // Ranks that ask hand in, behind a snapshot that is due.
  void LetHandIn();
  // With pass_copies. Who has left full parameters, or asks, may store when no other rank's device reads them any more.
  absl::Status LetStore();

 private:
  int world_size() const { return use_.plan->world_size; }
  // What ranks keep, as they said where they entered, takes the place of what they kept.
  bool SetTrainerStates();  // of the pass; false: no rank gave one
  // Over nodes: keeps what ranks have stored, and says it to the others.
  absl::Status SayStores();
  // True: the devices have come to all `signals`. Else `await(true)`, and `await(false)` when they have.
  absl::StatusOr<bool> HaveCome(const char* what, std::vector<DoneSignal> signals, void (TrainerWrites::*await)(bool));

  const Services use_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_WRITES_PASS_COMMITS_H_
