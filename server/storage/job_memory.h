#ifndef SHARDD_SERVER_STORAGE_JOB_MEMORY_H_
#define SHARDD_SERVER_STORAGE_JOB_MEMORY_H_

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/plan/optimizer_kinds.h"
#include "common/plan/plan.h"
#include "common/shm/fd_channel.h"
#include "server/device/device_op.h"
#include "server/device/slab_place.h"
#include "server/optimizer/decided_step.h"
#include "server/storage/kept_on_gpus.h"
#include "server/storage/rank_slots.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

class DeviceMemory;
class DeviceSlab;
class JobSlab;
struct OldValuesPlan;
class UndoSlab;

// A writeback of full parameters keeps the old bytes of what it writes until it is committed: at most all shards, and
// all state of the daemon's optimizer. It is allocated as it is needed.
int64_t WritebackUndoBytes(const ShardPlan& plan);

// Of these, what a job is promised when it is opened: all of them on the host. A job on GPUs may be larger than the
// host's memory, one that is cut over nodes than all of a node's, and both may never write back: they ask for them when
// they do. Steps in parts need them in every step.
inline int64_t PromisedUndoBytes(const ShardPlan& plan, const SlabPlace& place) {
  const bool may_ask_later = plan.cut_over_nodes && plan.memory.undo_bytes == 0;
  return place.memory == nullptr && !may_ask_later ? WritebackUndoBytes(plan) : 0;
}

class JobMemory;
// Bytes of the host that a job is promised beside the memory that it has, before anybody has attached to it.
int64_t UnusedHostBytes(const ShardPlan& plan, const JobMemory& memory);

// Bytes of the host that a job's plan promises to each session: all that the plan says, but for the gradient slots
// where those lie on a device.
int64_t HostSessionBytes(const ShardPlan& plan, const SlabPlace& place);

// Bytes of the host that a job's plan takes, sessions and promises included. `outlives`: the daemon.
int64_t PlannedHostBytes(const ShardPlan& plan, const SlabPlace& place, bool outlives);

// UNIMPLEMENTED, naming what of `plan` is not served where slabs lie on a device with this memory.
absl::Status CheckServedOn(const DeviceMemory& memory, const ShardPlan& plan);

// What `slab` has on each device, added to `purpose`.
void AddDeviceBytes(const DeviceSlab& slab, v1::Purpose* purpose);

// Of a job on GPUs: its shards, states and reduced gradients are memory of the host all the same.
inline bool IsOffloaded(const ShardPlan& plan) { return plan.config.offload() == v1::OFFLOAD_HOST; }
// A step changes shards here. Else ranks do it, or nobody.
inline bool DaemonUpdates(const ShardPlan& plan) {
  const v1::OptimizerKind kind = plan.config.optimizer().kind();
  return kind != v1::OPTIMIZER_KIND_TRAINER && kind != v1::OPTIMIZER_KIND_NONE;
}

// The slabs of one job, one per purpose, on the host or spread over the GPUs of its ranks. Immutable after Create but
// for SetKept and SetGradients; the bytes are written by the job's device work and, where ranks hand in and before
// version 1, by its core.
class JobMemory {
 public:
  // `reserved_bytes` of memory are others' already, though nobody has them yet. Checks the plan and what is
  // promised of the undo of a writeback against free memory and cgroup limit, then allocates and populates the
  // plan, but for the gradients of a large job, which come with the first ones (given_back_bytes). Blocks. `place`
  // outlives this. A device that is full is RESOURCE_EXHAUSTED too; sessions take their part of it when they are made,
  // and have it where the job `extends` another. `outlives`: the daemon; a job on GPUs has memory for old values then.
  static absl::StatusOr<std::unique_ptr<JobMemory>> Create(const ShardPlan& plan, const std::string& job,
                                                           int64_t reserved_bytes = 0, const SlabPlace& place = {},
                                                           bool extends = false, bool outlives = false);
  // Memory that outlives the daemon, by name.
  using Kept = KeptFds;
  // As Create, for a job that another daemon has left: of what is `kept` the memory is taken up, the rest is made. What
  // lies on GPUs is of `slabs`.
  static absl::StatusOr<std::unique_ptr<JobMemory>> TakeUp(const ShardPlan& plan, const std::string& job, Kept kept,
                                                           const SlabPlace& place = {}, const CustodySlabs& slabs = {});
  ~JobMemory();
  // Calls `hand_over` with all that a daemon needs that takes the job up, now and where gradients are made again. An
  // error is the first one of its.
  using HandOver = RankSlots::HandOver;
  absl::Status KeepBy(HandOver hand_over);
  // No daemon takes the job up.
  void EndCustody() const {
    if (rank_slots_ != nullptr) rank_slots_->EndCustody();
  }
  // Of a job on GPUs that outlives the daemon: what lies there.
  void DescribeKept(CustodySlabs* slabs) const;
  // It does not outlive it.
  void FreeOldValues();

  SlabPointers pointers() const;
  // Absent where the plan has no bytes for it.
  const JobSlab* shards() const { return shards_.get(); }
  const JobSlab* parameters() const { return parameters_.get(); }
  const JobSlab* gradients() const { return gradients_.get(); }
  const JobSlab* optimizer() const { return optimizer_.get(); }
  const JobSlab* pool() const { return pool_.get(); }
  // Gradient slots of ranks whose clients map them apart, on the host; null: they are on devices, or there are none.
  const std::shared_ptr<RankSlots>& rank_slots() const { return rank_slots_; }
  // Where the device of each rank makes sums before they are copied to the host, or added to those of other nodes, by
  // rank; empty: there is none.
  std::vector<char*> StagingByRank(const ShardPlan& plan) const;
  const JobSlab* staging() const { return staging_.get(); }
  // On GPUs, where parameters are cut over nodes: MemoryPlan::gather_staging of each rank, on its device, by rank.
  std::vector<char*> GatherStagingByRank(const ShardPlan& plan) const;
  // Where within shards() memory of another device begins, ascending; empty: all of it is in one place.
  const std::vector<int64_t>& shards_boundaries() const { return shards_boundaries_; }
  // The copy that a job whose trainers write goes back to: shards, then the optimizer's slab where trainers write that
  // too. Null until SetKept, but with pass_copies, and where another daemon has left one. MakeKept allocates, hands
  // over, and blocks; any thread.
  const JobSlab* kept() const { return kept_.get(); }
  absl::StatusOr<std::unique_ptr<JobSlab>> MakeKept(const ShardPlan& plan) const;
  void SetKept(std::unique_ptr<JobSlab> kept);
  const JobSlab* old_values() const { return old_values_.get(); }
  // For what trainers write back; null: parameters are cut over nodes, and they do not.
  UndoSlab* undo() const { return undo_.get(); }
  // Where updates of the rank write what they are about to change; `log` null: nowhere.
  Logged LoggedBy(UpdateLog* log, int rank) const;
  // Gradient shards in the place of those that there are, which a process may still write. On the host the pages of
  // these go first, so that both take no more than one; on GPUs there has to be room for both. Blocks; any thread,
  // while nothing reads or writes them. RESOURCE_EXHAUSTED: there is no room.
  absl::StatusOr<std::unique_ptr<JobSlab>> MakeGradientsAgain(const ShardPlan& plan) const;
  // Returns those before.
  std::unique_ptr<JobSlab> SetGradients(std::unique_ptr<JobSlab> gradients);
  const SlabPlace& place() const { return place_; }
  // What clients map, in the order of descriptors; null: the plan has no bytes for it.
  std::array<std::pair<SessionFd, const JobSlab*>, 5> mapped() const {
    return {{{kFdShards, shards()},
             {kFdParameters, parameters()},
             {kFdPool, pool()},
             {kFdGradients, gradients()},
             {kFdOptimizer, optimizer()}}};
  }
  int64_t allocated_bytes() const;
  // What was taken up of the daemon before, which is charged to that one's cgroup.
  int64_t taken_up_bytes() const { return taken_up_bytes_; }
  // Of these, what trainers have given back and will want again (shardd_give_back_gradient).
  int64_t given_back_bytes() const;
  void Describe(const ShardPlan& plan, v1::Memory* out) const;
  // QuotaBytesOf the plan.
  int64_t quota_bytes() const { return quota_bytes_; }

 private:
  explicit JobMemory(SlabPlace place);
  static absl::StatusOr<std::unique_ptr<JobMemory>> Make(const ShardPlan& plan, const std::string& job,
                                                         int64_t reserved_bytes, const SlabPlace& place, bool extends,
                                                         bool outlives, Kept kept, const CustodySlabs& slabs);
  // What outlives the daemon of a job that does, by name.
  std::vector<std::pair<const char*, const JobSlab*>> Surviving() const;
  absl::Status HandOverSlab(const char* name, const JobSlab& slab) const;
  // The next step would touch it all, a page at a time.
  static void MapTakenUp(const std::vector<const Slab*>& slabs);
  const SlabPlace place_;
  // Of the plan, as its devices hold it: computed once, because it takes long (MemoryOnGpus).
  MemoryPlan planned_;
  int64_t quota_bytes_ = 0;
  HandOver hand_over_;  // null: nothing outlives the daemon
  std::vector<int64_t> shards_boundaries_;
  // Of the slabs' sizes, what is other nodes'.
  int64_t elsewhere_bytes_ = 0;
  int64_t taken_up_bytes_ = 0;
  int64_t elsewhere_gradients_bytes_ = 0;
  std::shared_ptr<RankSlots> rank_slots_;  // also of whoever attaches
  std::unique_ptr<JobSlab> shards_, parameters_, gradients_, optimizer_, pool_, staging_, gather_staging_, kept_,
      old_values_, workspace_;
  std::unique_ptr<const OldValuesPlan> old_values_plan_;  // null: there are none
  std::unique_ptr<UndoSlab> undo_;                        // of shards_ and optimizer_
};

}  // namespace shardd

#endif  // SHARDD_SERVER_STORAGE_JOB_MEMORY_H_
