#ifndef SHARDD_COMMON_SCHEDULE_POOLED_UNSHARDS_H_
#define SHARDD_COMMON_SCHEDULE_POOLED_UNSHARDS_H_

// Unshards into the pool (UNSHARD_MODE_POOLED): which groups ranks have asked for, which slots they were granted, and
// which slots are being filled.
//
//   rank:  Ask --> waiting --GrantNext--> granted, the slot is filled --> there
//                                     \-> granted, the slot is being filled --Filled--> there
//
// This component decides; the job publishes what was granted and submits fills to devices.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/plan/plan.h"
#include "common/schedule/unshard_pool.h"

namespace shardd {

// A slot that device work has to fill with a group. Each ends with PooledUnshards::Filled, whatever came of it.
struct PoolFill {
  size_t pool = 0;
  int slot = -1;
  int group = -1;
  uint64_t epoch = 0;  // PooledUnshards' own count
};

// Owns the pools, and what each rank has asked for in its running session. Without pools (another unshard mode) nothing
// is ever asked for, and all methods but Ask, GrantNext and Prefetch are no-ops. Loop-confined.
class PooledUnshards {
 public:
  explicit PooledUnshards(std::shared_ptr<const ShardPlan> plan);

  bool pooled() const { return !pools_.empty(); }
  // Over several GPUs each has a pool of its own, which the ranks of that GPU share.
  size_t pool_of(int rank) const { return static_cast<size_t>(rank) % pools_.size(); }
  size_t pools() const { return pools_.size(); }
  int64_t OffsetBytes(size_t pool, int slot) const {  // in the pool's slab
    return plan_->pools[pool].offset_bytes + slot * plan_->pool_slot_bytes;
  }
  // No epoch has ended since the fill was granted.
  bool IsOfEpoch(const PoolFill& fill) const { return fill.epoch == epoch_; }
  // Fills that have been granted in this epoch and have not ended.
  int pending_fills() const { return pending_fills_; }
  // The rank was granted slots that are still being filled.
  bool AwaitsFill(int rank) const { return !ranks_[rank].awaited.empty(); }
  // The rank has asked for groups that it was not granted.
  bool Waits(int rank) const { return !ranks_[rank].waiting.empty(); }

  // The rank asks for the group once more. Requests are granted in their order.
  void Ask(int rank, int group);

  struct Grant {
    int group = -1;
    int64_t offset_bytes = 0;      // in the pool's slab
    uint64_t asked = 0;            // so often the rank has asked for the group in its session
    std::optional<PoolFill> fill;  // the caller has to submit it
    bool there = false;            // the slot is filled
    bool prefetched = false;
  };
  // Grants the rank's oldest request. Nothing: it has none, or each slot that nobody uses is still being filled; ask
  // again when a fill of its pool has ended. RESOURCE_EXHAUSTED: the rank must reshard a group first.
  absl::StatusOr<std::optional<Grant>> GrantNext(int rank);

  // For ranks that GrantNext gave nothing, or that were not to be asked: a fill of their pool has ended since, or
  // RetryAll was called. TakeRetries returns and forgets that, by pool.
  bool MayRetry() const { return std::find(retries_.begin(), retries_.end(), true) != retries_.end(); }
  void RetryAll() { retries_.assign(pools_.size(), true); }
  std::vector<bool> TakeRetries() { return std::exchange(retries_, std::vector<bool>(pools_.size(), false)); }

  struct Prefetched {
    bool granted = false;
    std::optional<PoolFill> fill;  // the caller has to submit it
  };
  // Grants the group ahead of the rank's request if the rank's quota and the pool have room for it.
  Prefetched Prefetch(int rank, int group);

  // By rank: the signals behind which devices read the slot no more. The fill has to wait for them.
  std::vector<std::pair<int, uint64_t>> ReadersBefore(const PoolFill& fill) const;

  struct There {
    int rank = -1;
    int group = -1;
    uint64_t asked = 0;  // so often the rank had asked for it when it was granted
  };
  // The fill has ended, or never began. Returns the requests that it serves: none if its version or its epoch is over.
  // Also serves ranks that have resharded the group since, because their streams wait for it.
  std::vector<There> Filled(const PoolFill& fill);

  // The rank uses the group no more. `done`: the signal behind which its device does not either; 0: at once.
  void Reshard(int rank, int group, uint64_t done);
  // Takes back all that the rank has asked for. `done`: as of Reshard.
  void GiveUp(int rank, uint64_t done);
  // The rank takes no part in this step any more.
  void Leave(int rank);
  // Signals and counts of the rank's next session begin anew.
  void EndSession(int rank);
  // What slots hold is of an older version.
  void NewVersion();
  // Drops all requests and grants. Fills that are under way end with Filled all the same.
  void EndEpoch();

 private:
  struct Requests {
    std::deque<int> waiting;          // groups; each at most once
    std::map<int, uint64_t> awaited;  // granted groups whose slot is being filled: asked for so often
    std::vector<uint64_t> asked;      // by group: requests of the session
  };
  PoolFill BeginFill(size_t pool, int slot, int group);

  const std::shared_ptr<const ShardPlan> plan_;
  std::vector<UnshardPool> pools_;  // as ShardPlan::pools; their slots are numbered from 0 in each
  std::vector<Requests> ranks_;
  // By pool, slot and rank: the signal behind which the rank's device reads the slot no more.
  std::vector<std::vector<std::vector<uint64_t>>> done_;
  std::vector<bool> retries_;  // by pool
  int pending_fills_ = 0;
  uint64_t epoch_ = 0;
};

}  // namespace shardd

#endif  // SHARDD_COMMON_SCHEDULE_POOLED_UNSHARDS_H_
