#ifndef SHARDD_SERVER_JOB_WRITES_SNAPSHOT_H_
#define SHARDD_SERVER_JOB_WRITES_SNAPSHOT_H_

// The one copy of shards, and of state that trainers keep, to which a job goes back whose trainers write.
//
// Where ranks hand in it is taken before one may, and the job goes back to it where an epoch ends meanwhile.
// With pass_copies trainers may store at any time and no store is seen: it is taken with commits, while every rank is
// in a call, and every epoch that ends goes back to it. If all ranks ask before they store into state that they keep
// (kAsksToStore), devices copy that, and the shards from what passes read, behind the commit, while ranks compute. The
// one copy is enough: until it is whole again what it is made from is the state to go back to, for nobody writes that
// meanwhile; a job goes back when it is whole, and a daemon that takes the job up completes it. Where the plan has no
// room for it (kept_bytes 0), because passes read copies of all that trainers write, as it is stored, those are the
// copy: each commit makes them anew.
//
// Where SnapshotMayBeInCopies, what passes read is the shards of the snapshot, too, and its slab has the state alone
// (in_copies). Every commit makes the copies anew, so it takes a snapshot; that one is begun before the copies are
// written over. Memory for shards of its own is taken only when passes come too fast for that (ChooseInCopies).
//
// Over nodes there are two, in turns: one of the committed version, and the next of what ranks have stored, which this
// node has said to the others and not heard of. It is taken while every rank is in a call, before that is said; the
// commit makes it the one to go back to. So nothing that trainers store reaches either, a node can go both ways for as
// long as node 0 is silent, and all nodes go back to the same version.
//
//   none --BeginTaking--> taking --Taken--> whole --GoBack--> going back --EndGoBack--> whole
//             (its slab holds nothing until Taken)
//   whole --BeginTakingWithCommit--> none --BeginBehind--> behind --TakenBehind--> whole

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/plan/plan.h"
#include "server/job/writes/snapshot_pace.h"
#include "server/optimizer/optimizer.h"

namespace shardd {

class JobMemory;
class OptimizerDevices;

// Owns what is known of the copy: whether it is whole, and of which step, trainer states and age it is. Its bytes are
// JobMemory's. Loop-confined.
class Snapshot {
 public:
  // All of these outlive this.
  Snapshot(const ShardPlan* plan, const JobMemory* memory, const OptimizerDevices* devices);

  bool whole() const { return whole_; }
  // There is one to go back to, at once or when it is whole (behind).
  bool exists() const { return whole_ || behind_; }
  // The rest of it is being copied behind the commit that it is of.
  bool behind() const { return behind_; }
  // It is being taken, behind nothing else of the job's.
  bool taking() const { return taking_; }
  // The job goes back to it: nobody attaches.
  bool going_back() const { return going_back_; }
  int64_t step() const { return step_; }  // of which it is
  // Trainers have written nothing since that is a version.
  bool fresh() const { return whole_ && age_ == 0; }
  // Ranks hand in, and passes commit, so often before the next copy is taken (JobConfig.keep_every).
  bool IsDueBeforeHandIn() const { return !whole_ || age_ >= plan_->config.keep_every(); }
  // Wherever its shards are.
  bool IsDueByItself() const { return with_each_ || due_ || !exists() || age_ + 1 >= plan_->config.keep_every(); }
  bool IsDueWithPass() const { return in_copies_ || IsDueByItself(); }
  // Its shards are what passes read, which the next commit makes anew: that has to take another one.
  bool in_copies() const { return in_copies_; }
  // A commit takes one. Decides whether its shards are what passes read. `due`: it would be taken in any case. Where
  // several in a row would not, copying would take more than its share of the time: this one has shards of its own, and
  // so have all that follow. `may_be`: the next daemon would find them there.
  void ChooseInCopies(bool due, bool may_be);
  // A rank enters a pass. Where the job does not say how often, what snapshots cost decides; it stays due until taken.
  void PassBegins(absl::Time now) { due_ = due_ || (plan_->snapshots_by_cost && pace_.IsDue(now)); }

  // Trainers have written one more version.
  void Age() { ++age_; }
  // The shards have changed otherwise, and moments or counts with them.
  void Outdate() { age_ = std::max<int>(age_, plan_->config.keep_every()); }

  // From here to the end of the epoch it is due with each pass.
  void TakeWithEach() { with_each_ = true; }
  void EndEpoch() { with_each_ = taking_ = has_next_ = false; }

  // Over nodes: there are two.
  bool two() const { return plan_->memory.kept_bytes > plan_->memory.snapshot_bytes; }
  // The next one is whole, and is the one to go back to where TakeNext is called.
  bool has_next() const { return has_next_; }
  void HasNext() { has_next_ = true; }
  void TakeNext(int64_t step, const std::vector<std::string>& trainer_states);
  // The next one is the second, or the first. The daemon before has left the other one as the committed version's.
  bool next_is_second() const { return !second_; }
  void TakeUp(bool second, bool in_copies) {
    second_ = second;
    in_copies_ = in_copies;
  }
  // Within the memory's kept(): where the copy of the committed version begins, and the next one.
  int64_t offset_bytes() const { return (second_ ? 1 : 0) * plan_->memory.snapshot_bytes; }
  int64_t next_offset_bytes() const { return (second_ || !two() ? 0 : 1) * plan_->memory.snapshot_bytes; }
  // The memory's slabs, with the next copy in the place of the shards. REQUIRES: two().
  SlabPointers NextPointers() const;

  // The copy is about to be written over, with shards of its own.
  void BeginTaking() {
    taking_ = true;
    whole_ = in_copies_ = false;
  }
  // As BeginTaking, while a commit is under way that waits for the copy and is part of it.
  void BeginTakingWithCommit() { whole_ = false; }
  // What it costs: ranks wait from one to the other.
  void CopyBegins(absl::Time now) { pace_.Began(now); }
  void CopyEnds(absl::Time now) { pace_.Ended(now); }
  // The copy has what the commit under way is about to make the version: CommitTaken, once it has, returns true.
  void TakenWithCommit() { with_commit_ = true; }
  bool taken_with_commit() const { return with_commit_ || has_next_; }
  bool CommitTaken() { return std::exchange(with_commit_, false); }
  // The copy is whole: of `step`, and with the states that trainers gave with it.
  void Taken(int64_t step, const std::vector<std::string>& trainer_states);
  // Devices begin to copy the rest of the snapshot of the version that is about to be committed. CommitBehind, once it
  // has, returns true; then OfCommitted says of what it is.
  void BeginBehind() { behind_ = commits_behind_ = true; }
  bool CommitBehind() { return std::exchange(commits_behind_, false); }
  void OfCommitted(int64_t step, const std::vector<std::string>& trainer_states);
  void TakenBehind(absl::Time now) {
    behind_ = false;
    whole_ = true;
    pace_.EndedBehind(now);
  }
  // Its ranks wait for all of it: the epoch is to end behind it.
  bool with_each() const { return with_each_; }
  // Nothing is being taken any more, because of an error.
  void GiveUpTaking() { taking_ = false; }

  // Begins to go back. step() and trainer_states() are the committed ones from here on.
  void GoBack() {
    going_back_ = true;
    due_ = false;
    age_ = 0;
  }
  void EndGoBack() { going_back_ = false; }
  const std::vector<std::string>& trainer_states() const { return trainer_states_; }

  // Submits the copy of a part from the shards, or `back` to them, each device what it works on. `done` is called once
  // by each device. `step`: for labels. Over nodes it is the next one that is taken.
  void Submit(bool back, KeptPart part, int64_t step, const std::function<void(absl::Status)>& done) const;

 private:
  static constexpr int kMostEarly = 2;  // in a row: a pass may be short for once

  bool HasRoomForShards() const;

  const ShardPlan* const plan_;
  const JobMemory* const memory_;
  const OptimizerDevices* const devices_;
  bool whole_ = false;
  bool taking_ = false;
  bool behind_ = false;
  bool with_commit_ = false;
  bool commits_behind_ = false;
  bool with_each_ = false;
  bool may_be_in_copies_;
  bool in_copies_ = false;
  int early_ = 0;  // in a row: taken for the sake of the copies alone
  bool going_back_ = false;
  bool second_ = false;  // over nodes: of the two, which is of the committed version
  bool has_next_ = false;
  int64_t step_ = 0;
  std::vector<std::string> trainer_states_;  // by rank
  SnapshotPace pace_;
  bool due_ = false;  // as its pace says
  int age_ = 0;       // versions that trainers have written since
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_WRITES_SNAPSHOT_H_
