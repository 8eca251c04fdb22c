#ifndef SHARDD_SERVER_JOB_WRITES_SNAPSHOT_KEEPER_H_
#define SHARDD_SERVER_JOB_WRITES_SNAPSHOT_KEEPER_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/plan/plan.h"
#include "server/job/job_part.h"
#include "server/job/membership/past_process.h"
#include "server/job/work/optimizer_devices.h"
#include "server/job/writes/former_writers.h"
#include "server/job/writes/snapshot.h"

namespace shardd {

class AskedSteps;
class Committed;
class CoreLoop;
class JobEvents;
class JobMemory;
class JobWork;
class OptimizerDevices;
class Sessions;
class StepDecision;
class TrainerWrites;

// Takes the snapshot of a job whose trainers write, and brings the job back to it.
//
// A job goes back where an epoch ends in which trainers may have stored into the shards:
//
//   GoBackIfStored --> former writers attach again, or end --> MayCopyBack --CopyBack--> the snapshot is a new version
//
// Owns the snapshot and the processes that it waits for. Loop-confined.
class SnapshotKeeper final : public JobPart {
 public:
  struct Facts {
    const ShardPlan* plan = nullptr;
    const AskedSteps* steps = nullptr;
    const StepDecision* decision = nullptr;
    const Sessions* sessions = nullptr;
    const TrainerWrites* writes = nullptr;
    const OptimizerDevices* devices = nullptr;
  };
  struct Services {
    JobMemory* memory = nullptr;  // gets a slab for the snapshot when the first is taken, but with pass_copies
    Committed* committed = nullptr;
    JobWork* work = nullptr;
    JobEvents* events = nullptr;
    CoreLoop* memory_worker = nullptr;  // allocates and frees slabs
    JobControl* job = nullptr;
  };
  // All of both outlive this. `uid`: the trainers'. No process of another one is killed.
  SnapshotKeeper(Facts facts, Services services, uint32_t uid)
      : see_(facts), use_(services), snapshot_(facts.plan, use_.memory, facts.devices), former_writers_(uid) {}

  const Snapshot& snapshot() const { return snapshot_; }

  // Takes it while nobody writes and the shards are the committed version. An error ends the epoch.
  void Take();
  // A version is about to be made: where what passes read is the snapshot, or its shards, it is written over. `stepped`
  // as TakeThen. REQUIRES: the snapshot is not behind.
  void BeginVersion(bool stepped);
  // Calls `commit` at once, or, with pass_copies and where a snapshot is `due`, when it is taken of the version that
  // `commit` is about to commit. `stepped`: with it ends the step that ranks have asked for, or have made by their own
  // optimizers. REQUIRES: a version is being made.
  void TakeThen(bool due, bool stepped, std::function<void()> commit);
  // Over nodes: runs `before`, by rank, takes the next snapshot, and calls `then`, which says it to the other nodes;
  // the version that is committed next is that. An error ends the epoch. REQUIRES: every rank is in a call.
  void TakeNext(DeviceOps before, std::function<void()> then);
  // ... or it was taken otherwise.
  void HasNext();
  // Over nodes: the next one was brought from another node, and is of what is committed: goes back to that.
  void Restored();
  // What another daemon has left of snapshots.
  struct Left {
    bool shards_in_copies = false;  // as of TakeUpLog
    bool second = false;            // over nodes: of two it is that one
    bool has_next = false;          // ... and the other one is promised
  };
  // The shards that another daemon has left may be torn, and its snapshot is whole: goes back to that. REQUIRES: it is
  // of the committed step, and no trainer has these shards but `former`.
  void TakeUp(std::vector<PastProcess> former, const Left& left);
  void PassBegins(absl::Time now) { snapshot_.PassBegins(now); }
  // Trainers have stored into the shards what is about to be committed, or the shards have changed otherwise.
  void Age() { snapshot_.Age(); }
  void Outdate() { snapshot_.Outdate(); }
  // The epoch is to end behind a step: each is one of which there is a snapshot.
  void TakeWithEach() { snapshot_.TakeWithEach(); }

  // The epoch is ending, and its sessions are still there: what trainers may have stored is to be taken back.
  void GoBackIfStored();
  // Processes of an epoch that has ended may still store into the shards. "": none does.
  bool awaits_writers() const { return former_writers_.waiting(); }
  std::string AwaitedWriters() const { return awaits_writers() ? former_writers_.Names() : ""; }
  bool MayCopyBack() const { return awaits_writers() && former_writers_.none() && !snapshot_.behind(); }
  void CopyBack();

  // A rank asks to attach, as FormerWriters::Attaching.
  std::string Attaching(int rank, int32_t pid, const UniqueFd& process, bool replace);
  // ABORTED: the attach waits for those that may still store. `what` begins the error, `not_killed` is Attaching's.
  absl::Status CheckWriters(const std::string& what, const std::string& not_killed) const;
  // ABORTED: no session may begin before the shards are back, and, with pass_copies, before there is a snapshot, which
  // this begins to take.
  absl::Status CheckMayBegin(const std::string& what) override;

  void StepCommitted() override;
  void ValuesCommitted() override { Outdate(); }
  void VersionCommitted() override;
  void EndEpoch() override { snapshot_.EndEpoch(); }

 private:
  // `version`: that of which it will be.
  void BeginSnapshot(bool stepped, uint64_t version);
  void Copy(bool back, KeptPart part, std::function<void(absl::Status)> done);
  // Whether the snapshot of a pass's commit may be copied behind it: no rank stores into what its devices read then.
  bool MayTakeBehind() const;
  // Begins that, for the version that is about to be committed.
  void TakeBehind();
  void TookIt();
  void EndCopyBack();

  const Facts see_;
  const Services use_;
  Snapshot snapshot_;
  FormerWriters former_writers_;
  int copying_back_ = 0;  // copies under way
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_WRITES_SNAPSHOT_KEEPER_H_
