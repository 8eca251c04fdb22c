#include "common/schedule/pooled_unshards.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace shardd {

PooledUnshards::PooledUnshards(std::shared_ptr<const ShardPlan> plan)
    : plan_(std::move(plan)), ranks_(plan_->world_size) {
  for (const PoolPlan& pool : plan_->pools) {
    pools_.emplace_back(pool.slots, plan_->pool_quota, plan_->world_size, static_cast<int>(plan_->groups.size()));
    done_.emplace_back(pool.slots, std::vector<uint64_t>(plan_->world_size, 0));
  }
  retries_.assign(pools_.size(), false);
  for (Requests& requests : ranks_) {
    requests.asked.resize(plan_->groups.size());
  }
}

void PooledUnshards::Ask(int rank, int group) {
  Requests& requests = ranks_[rank];
  ++requests.asked[group];
  if (std::find(requests.waiting.begin(), requests.waiting.end(), group) == requests.waiting.end()) {
    requests.waiting.push_back(group);
  }
}

absl::StatusOr<std::optional<PooledUnshards::Grant>> PooledUnshards::GrantNext(int rank) {
  Requests& requests = ranks_[rank];
  if (requests.waiting.empty()) {
    return std::nullopt;
  }
  const int group = requests.waiting.front();
  const size_t pool = pool_of(rank);
  const absl::StatusOr<UnshardPool::Use> use = pools_[pool].Acquire(rank, group);
  if (!use.ok()) {
    return absl::Status(use.status().code(),
                        absl::StrCat("Unshard group \"", plan_->groups[group].name, "\": ", use.status().message()));
  }
  if (use->slot < 0) {
    return std::nullopt;
  }
  requests.waiting.pop_front();
  Grant grant;
  grant.group = group;
  grant.offset_bytes = OffsetBytes(pool, use->slot);
  grant.prefetched = use->prefetched;
  if (use->fill) {
    grant.fill = BeginFill(pool, use->slot, group);
  }
  grant.asked = requests.asked[group];
  grant.there = use->ready;
  if (!grant.there) {
    requests.awaited[group] = grant.asked;
  }
  return grant;
}

PooledUnshards::Prefetched PooledUnshards::Prefetch(int rank, int group) {
  const size_t pool = pool_of(rank);
  const UnshardPool::Use use = pools_[pool].Prefetch(rank, group);
  Prefetched result;
  result.granted = use.slot >= 0;
  if (use.fill) {
    result.fill = BeginFill(pool, use.slot, group);
  }
  return result;
}

PoolFill PooledUnshards::BeginFill(size_t pool, int slot, int group) {
  ++pending_fills_;
  return {pool, slot, group, epoch_};
}

std::vector<std::pair<int, uint64_t>> PooledUnshards::ReadersBefore(const PoolFill& fill) const {
  std::vector<std::pair<int, uint64_t>> readers;
  const std::vector<uint64_t>& by_rank = done_[fill.pool][fill.slot];
  for (int rank = 0; rank < static_cast<int>(by_rank.size()); ++rank) {
    if (by_rank[rank] != 0) {
      readers.emplace_back(rank, by_rank[rank]);
    }
  }
  return readers;
}

std::vector<PooledUnshards::There> PooledUnshards::Filled(const PoolFill& fill) {
  // Also of an epoch that has ended: until now the slot could not be given to another group.
  (void)pools_[fill.pool].Filled(fill.slot);
  retries_[fill.pool] = true;
  if (fill.epoch != epoch_) {
    return {};
  }
  --pending_fills_;
  if (pools_[fill.pool].slot_of(fill.group) != fill.slot) {
    return {};  // a new version has come: the group is being filled into another slot
  }
  std::vector<There> there;
  for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
    if (pool_of(rank) != fill.pool) {
      continue;
    }
    if (const auto awaited = ranks_[rank].awaited.extract(fill.group); !awaited.empty()) {
      there.push_back({rank, fill.group, awaited.mapped()});
    }
  }
  return there;
}

void PooledUnshards::Reshard(int rank, int group, uint64_t done) {
  if (!pooled()) {
    return;
  }
  Requests& requests = ranks_[rank];
  // The rank may use the group all the same, by an earlier request.
  requests.waiting.erase(std::remove(requests.waiting.begin(), requests.waiting.end(), group), requests.waiting.end());
  const size_t pool = pool_of(rank);
  if (const int slot = pools_[pool].slot_of(group); slot >= 0) {
    done_[pool][slot][rank] = done;
  }
  pools_[pool].Release(rank, group);
  if (done == 0) {  // else its stream may wait for it
    requests.awaited.erase(group);
  }
}

void PooledUnshards::GiveUp(int rank, uint64_t done) {
  if (!pooled()) {
    return;
  }
  const size_t pool = pool_of(rank);
  pools_[pool].ReleaseAll(rank);
  if (done == 0) {
    ranks_[rank].awaited.clear();
  } else {  // what its stream still reads, and waits for
    for (std::vector<uint64_t>& by_rank : done_[pool]) {
      by_rank[rank] = done;
    }
  }
  ranks_[rank].waiting.clear();
}

void PooledUnshards::Leave(int rank) {
  if (pooled()) {
    pools_[pool_of(rank)].ReleaseAll(rank);
  }
  ranks_[rank].waiting.clear();
  ranks_[rank].awaited.clear();
}

void PooledUnshards::EndSession(int rank) {
  for (auto& pool : done_) {
    for (std::vector<uint64_t>& by_rank : pool) {
      by_rank[rank] = 0;
    }
  }
  std::fill(ranks_[rank].asked.begin(), ranks_[rank].asked.end(), 0);
}

void PooledUnshards::NewVersion() {
  for (UnshardPool& pool : pools_) {
    pool.Invalidate();
  }
}

void PooledUnshards::EndEpoch() {
  ++epoch_;
  pending_fills_ = 0;
  for (Requests& requests : ranks_) {
    requests.waiting.clear();
    requests.awaited.clear();
  }
  NewVersion();
}

}  // namespace shardd
