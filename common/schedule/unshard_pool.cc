#include "common/schedule/unshard_pool.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace shardd {

UnshardPool::UnshardPool(int slots, int quota, int ranks, int groups)
    : quota_(quota), slots_(slots), slot_of_group_(groups, -1), held_(ranks, 0) {
  for (Slot& slot : slots_) {
    slot.users.assign(ranks, 0);
    slot.prefetched.assign(ranks, 0);
  }
}

void UnshardPool::ForgetGroup(Slot& slot) {
  if (slot.group >= 0) {
    slot_of_group_[slot.group] = -1;
  }
  slot.group = -1;
  slot.ready = false;
}

void UnshardPool::BeginFill(int slot, int group) {
  ForgetGroup(slots_[slot]);
  slots_[slot].group = group;
  slots_[slot].filling = true;
  slot_of_group_[group] = slot;
}

int UnshardPool::FreeSlot() {
  int kept = -1;
  for (int i = 0; i < slots(); ++i) {
    const Slot& slot = slots_[i];
    if (slot.filling || slot.references > 0) {
      continue;
    }
    if (slot.group < 0) {
      return i;
    }
    if (kept < 0) {
      kept = i;  // holds a group that nobody uses: only if no slot is empty
    }
  }
  return kept;
}

bool UnshardPool::SomeAreOnlyFilling() const {
  return std::any_of(slots_.begin(), slots_.end(),
                     [](const Slot& slot) { return slot.filling && slot.references == 0; });
}

void UnshardPool::DropPrefetches(int rank) {
  for (Slot& slot : slots_) {
    if (slot.prefetched[rank] != 0) {
      slot.prefetched[rank] = 0;
      --slot.references;
      --held_[rank];
    }
  }
}

absl::StatusOr<UnshardPool::Use> UnshardPool::Acquire(int rank, int group) {
  Use use;
  int at = slot_of_group_[group];
  if (at >= 0 && slots_[at].prefetched[rank] != 0) {
    slots_[at].prefetched[rank] = 0;
    slots_[at].users[rank] = 1;
    use.prefetched = true;
  } else if (at < 0 || slots_[at].users[rank] == 0) {
    if (held_[rank] >= quota_) {
      DropPrefetches(rank);
    }
    if (held_[rank] >= quota_) {
      return absl::ResourceExhaustedError(absl::StrCat("rank holds ", held_[rank], " unsharded groups (at most ",
                                                       quota_, "; rank=", rank,
                                                       "); reshard one first or raise max_inflight_unshards"));
    }
    if (at < 0) {
      at = FreeSlot();
      for (int other = 0; at < 0 && other < static_cast<int>(held_.size()); ++other) {
        DropPrefetches(other);
        at = FreeSlot();
      }
      if (at < 0 && SomeAreOnlyFilling()) {
        return use;
      }
      if (at < 0) {
        return absl::ResourceExhaustedError(
            absl::StrCat("no free slot among ", slots(), " of the unsharded pool (rank=", rank, ")"));
      }
      BeginFill(at, group);
      use.fill = true;
    }
    slots_[at].users[rank] = 1;
    ++slots_[at].references;
    ++held_[rank];
  }
  use.slot = at;
  use.ready = slots_[at].ready;
  return use;
}

UnshardPool::Use UnshardPool::Prefetch(int rank, int group) {
  Use use;
  int at = slot_of_group_[group];
  if (at >= 0 && (slots_[at].users[rank] != 0 || slots_[at].prefetched[rank] != 0)) {
    return use;
  }
  if (held_[rank] >= quota_) {
    return use;
  }
  if (at < 0) {
    at = FreeSlot();
    if (at < 0) {
      return use;
    }
    BeginFill(at, group);
    use.fill = true;
  }
  slots_[at].prefetched[rank] = 1;
  ++slots_[at].references;
  ++held_[rank];
  use.slot = at;
  use.ready = slots_[at].ready;
  return use;
}

void UnshardPool::Release(int rank, int group) {
  const int at = slot_of_group_[group];
  if (at >= 0 && slots_[at].users[rank] != 0) {
    slots_[at].users[rank] = 0;
    --slots_[at].references;
    --held_[rank];
  }
}

void UnshardPool::ReleaseAll(int rank) {
  DropPrefetches(rank);
  for (int group = 0; group < static_cast<int>(slot_of_group_.size()); ++group) {
    Release(rank, group);
  }
}

std::vector<int> UnshardPool::Filled(int at) {
  Slot& slot = slots_[at];
  slot.filling = false;
  std::vector<int> waiting;
  if (slot.stale) {
    slot.stale = false;
    return waiting;
  }
  slot.ready = true;
  for (int rank = 0; rank < static_cast<int>(slot.users.size()); ++rank) {
    if (slot.users[rank] != 0) {
      waiting.push_back(rank);
    }
  }
  return waiting;
}

void UnshardPool::Invalidate() {
  for (Slot& slot : slots_) {
    ForgetGroup(slot);
    slot.stale = slot.filling;
    slot.users.assign(slot.users.size(), 0);
    slot.prefetched.assign(slot.prefetched.size(), 0);
    slot.references = 0;
  }
  held_.assign(held_.size(), 0);
}

}  // namespace shardd
