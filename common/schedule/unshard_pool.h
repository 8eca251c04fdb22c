#ifndef SHARDD_COMMON_SCHEDULE_UNSHARD_POOL_H_
#define SHARDD_COMMON_SCHEDULE_UNSHARD_POOL_H_

// Slots of the unsharded pool (POOLED): which group lies where, who uses it. A group is unsharded once per node (over
// several GPUs: once per GPU, each with a pool of its own) and version; all ranks that need it share the slot. The rate
// limiter is here: a rank holds at most `quota` slots, those prefetched for it included, and the plan has as many slots
// as all quotas together, so that a rank never waits for another one's slot and, as long as it keeps to its nesting,
// never for itself. What it may wait for is the end of fills: a rank that is ahead of its GPU gives back slots that are
// still being filled.

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

namespace shardd {

// Loop-confined.
class UnshardPool {
 public:
  UnshardPool(int slots, int quota, int ranks, int groups);

  struct Use {
    int slot = -1;            // -1, of Acquire: every slot that nobody holds is still being filled
    bool fill = false;        // the caller must fill it and then call Filled
    bool ready = false;       // filled already
    bool prefetched = false;  // the rank's own prefetch had asked for it
  };
  // The rank needs the group now. Drops the rank's untouched prefetches if its quota is used up, then other ranks'
  // untouched ones if no slot is free. Slot -1, and nothing is held: ask again when a fill has ended (Filled).
  // RESOURCE_EXHAUSTED: the rank holds `quota` groups and must reshard one.
  absl::StatusOr<Use> Acquire(int rank, int group);
  // As Acquire for a request to come; slot -1 when there is no room in the rank's quota, no free slot, or nothing to
  // do.
  Use Prefetch(int rank, int group);
  // The rank reads the group no more. The slot keeps its bytes until it is needed for another group.
  void Release(int rank, int group);
  // The rank is gone: all that it held and was to hold.
  void ReleaseAll(int rank);
  // A fill has ended. Returns the ranks that wait for it.
  std::vector<int> Filled(int slot);
  // Bytes are old (a commit) or uses are gone (an abort). REQUIRES for a commit: no rank holds a slot.
  void Invalidate();

  int slot_of(int group) const { return slot_of_group_[group]; }  // -1: nowhere
  int slots() const { return static_cast<int>(slots_.size()); }
  int held(int rank) const { return held_[rank]; }
  int quota() const { return quota_; }

 private:
  struct Slot {
    int group = -1;
    bool filling = false;  // device work writes into it; it cannot be given to another group until Filled
    bool ready = false;
    bool stale = false;               // invalidated while filling
    std::vector<uint8_t> users;       // by rank: 1 holds
    std::vector<uint8_t> prefetched;  // by rank: asked for ahead, not touched yet
    int references = 0;               // ranks in either
  };
  int FreeSlot();
  bool SomeAreOnlyFilling() const;
  void DropPrefetches(int rank);
  void ForgetGroup(Slot& slot);
  void BeginFill(int slot, int group);

  const int quota_;
  std::vector<Slot> slots_;
  std::vector<int> slot_of_group_;  // -1: nowhere
  std::vector<int> held_;           // by rank
};

}  // namespace shardd

#endif  // SHARDD_COMMON_SCHEDULE_UNSHARD_POOL_H_
