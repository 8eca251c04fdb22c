// Unshard and reshard.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/job_core.h"

namespace shardd {

absl::Status JobCore::OnUnshard(Session* session, int group, int64_t phase) {
  const int rank = session->rank();
  if (version_ == 0) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank,
                     absl::StrCat("Unshard group \"", group_name(group), "\""),
                     "the job has no parameters yet; write them and CommitParameters first");
  }
  // Overtaken: sent before the rank paused once more.
  const bool begins = pass_issued_ && ranks_[rank].pass == Pass::kEntering;  // its client has gone on
  if (trainers_write() && ranks_[rank].pass != Pass::kInside && !ranks_[rank].overtaken && !begins) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank,
                     absl::StrCat("Unshard group \"", group_name(group), "\""),
                     "the rank is outside of a pass; EnterPass first");
  }
  if (phase != v1::PHASE_FORWARD && phase != v1::PHASE_BACKWARD) {
    return RankError(absl::StatusCode::kInvalidArgument, rank,
                     absl::StrCat("Unshard group \"", group_name(group), "\""),
                     absl::StrCat("unknown phase (got ", phase, ", want 1 or 2)"));
  }
  const bool forward = phase == v1::PHASE_FORWARD;
  SHARDD_RETURN_IF_ERROR(session->handles[group].Apply(
      forward ? HandleEvent::kUnshardForward : HandleEvent::kUnshardBackward, group_name(group), rank));
  counters_.set_unshards(counters_.unshards() + 1);
  const OrderEntry::Kind kind = forward ? OrderEntry::Kind::kUnshardForward : OrderEntry::Kind::kUnshardBackward;
  SHARDD_RETURN_IF_ERROR(Observe(session, {kind, group}));
  if (!pooled_) {
    // The version's word tells the client when it may read; nothing else has to happen.
    return session->handles[group].Apply(HandleEvent::kUnshardDone, group_name(group), rank);
  }
  session->CountUnshard(group);
  auto& deferred = ranks_[rank].deferred_unshards;
  if (std::find(deferred.begin(), deferred.end(), group) == deferred.end()) {
    deferred.push_back(group);
  }
  if (ranks_[rank].stepped || committing_ || begins) {
    // It asks for the version that is being made.
    return absl::OkStatus();
  }
  SHARDD_RETURN_IF_ERROR(UnshardDeferred(rank));
  if (!deferred.empty()) {
    return absl::OkStatus();  // there is no slot for it, so none for what would be prefetched
  }
  if (forward ? plan_->config.forward_prefetch() : plan_->config.backward_prefetch() == v1::BACKWARD_PREFETCH_PRE) {
    return PrefetchNext(rank, kind);
  }
  return absl::OkStatus();
}

absl::Status JobCore::UnshardDeferred(int rank) {
  if (committing_ || (pass_copies() && ranks_[rank].pass == Pass::kEntering)) {
    return absl::OkStatus();  // what it is to read is being made
  }
  auto& deferred = ranks_[rank].deferred_unshards;
  while (!deferred.empty()) {
    SHARDD_ASSIGN_OR_RETURN(const bool has_slot, UnshardIntoPool(rank, deferred.front()));
    if (!has_slot) break;
    deferred.pop_front();
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> JobCore::UnshardIntoPool(int rank, int group) {
  const size_t pool = PoolNumber(rank);
  absl::StatusOr<UnshardPool::Use> use = pools_[pool].Acquire(rank, group);
  if (!use.ok()) {
    return absl::Status(use.status().code(),
                        absl::StrCat("Unshard group \"", group_name(group), "\": ", use.status().message()));
  }
  if (use->slot < 0) {
    return false;
  }
  if (use->prefetched) {
    counters_.set_prefetch_hits(counters_.prefetch_hits() + 1);
  }
  if (use->fill) {
    SHARDD_RETURN_IF_ERROR(FillSlot(pool, use->slot, group));
  }
  Session* session = sessions_[rank].get();
  session->PublishUnshardIssued(group, SlotOffsetBytes(pool, use->slot));
  if (use->ready) {
    session->PublishUnsharded(group, session->asked(group));
    SHARDD_RETURN_IF_ERROR(session->handles[group].Apply(HandleEvent::kUnshardDone, group_name(group), rank));
    return true;
  }
  ranks_[rank].awaited_unshards[group] = session->asked(group);
  return true;
}

absl::Status JobCore::PrefetchNext(int rank, OrderEntry::Kind kind) {
  const std::optional<int32_t> next = orders_[rank].NextUnshard(kind);
  if (!next.has_value()) {
    return absl::OkStatus();
  }
  const UnshardPool::Use use = pools_[PoolNumber(rank)].Prefetch(rank, *next);
  if (use.slot >= 0) {
    counters_.set_prefetches(counters_.prefetches() + 1);
    if (use.fill) {
      return FillSlot(PoolNumber(rank), use.slot, *next);
    }
  }
  return absl::OkStatus();
}

// Behind the GPUs of those who have read what lies there.
absl::Status JobCore::FillSlot(size_t pool, int slot, int group) {
  ++pending_fills_;
  Held fill;
  fill.order = Held::Order::kFills;
  fill.what = absl::StrCat("Unshard group \"", group_name(group), "\"");
  for (int rank = 0; rank < world_size(); ++rank) {
    if (const uint64_t done = pool_done_[pool][slot][rank]; done != 0) {
      fill.signals.push_back(SignalOf(rank, done));
    }
  }
  fill.pool = pool;
  fill.pool_slot = slot;
  fill.run = [this, pool, slot, group] {
    SubmitFill(pool, slot, group);
    return absl::OkStatus();
  };
  return WhenGivenBack(std::move(fill));
}

void JobCore::SubmitFill(size_t pool, int slot, int group) {
  counters_.set_unshard_copies(counters_.unshard_copies() + 1);
  AllGatherRequest request;
  request.plan = plan_.get();
  request.group = group;
  request.shards = memory_->pointers().shards;
  request.parameters = memory_->pointers().parameters;
  request.destination = memory_->pool()->At(SlotOffsetBytes(pool, slot));
  if (pools_.size() > 1) {
    request.reader = static_cast<int>(pool);  // the first of its ranks; all are at one device
    request.boundaries = memory_->shards_boundaries();
  }
  request.label = absl::StrCat("unshard ", group_name(group), " version ", version_);
  const bool cut_over_nodes = node_gather_ != nullptr;
  const auto filled =
      Join(cut_over_nodes ? 2 : 1, [this, pool, slot, group, epoch = epoch_](const absl::Status& status) {
        // Also when the epoch went on: until now the slot could not be given to another group.
        (void)pools_[pool].Filled(slot);
        if (closed_) {
          return;
        }
        if (epoch == epoch_) {
          --pending_fills_;
          if (!status.ok()) {
            Abort(status, {});
            return;
          }
          PublishFilled(pool, slot, group);
        }
        if (absl::Status freed = SlotIsFree(pool); !freed.ok()) {
          Abort(std::move(freed), {});
        }
      });
  if (cut_over_nodes) {
    GatherFromNodes({group, version_, epoch_, request.destination, request.label, filled});
  }
  collective_->AllGather(std::move(request), filled);
}

// For all who have asked, also who has resharded it by now, because its stream waits for the word. A slot that was
// invalidated meanwhile is nobody's: the group is being filled into another one.
void JobCore::PublishFilled(size_t pool, int slot, int group) {
  if (pools_[pool].slot_of(group) != slot) {
    return;
  }
  for (int rank = 0; rank < world_size(); ++rank) {
    if (PoolNumber(rank) != pool) {
      continue;
    }
    Session* session = sessions_[rank].get();
    const auto awaited = ranks_[rank].awaited_unshards.extract(group);
    if (session != nullptr && !awaited.empty()) {
      session->PublishUnsharded(group, awaited.mapped());
      (void)session->handles[group].Apply(HandleEvent::kUnshardDone, group_name(group), rank);
    }
  }
}

// For ranks of which every slot that nobody held was being filled. After another epoch's fill too.
absl::Status JobCore::SlotIsFree(size_t pool) {
  for (int rank = 0; rank < world_size(); ++rank) {
    if (PoolNumber(rank) == pool && sessions_[rank] != nullptr && !ranks_[rank].stepped && !committing_) {
      SHARDD_RETURN_IF_ERROR(UnshardDeferred(rank));
    }
  }
  return MaybeDecide();
}

absl::Status JobCore::OnReshard(Session* session, int group, uint64_t done) {
  const int rank = session->rank();
  SHARDD_RETURN_IF_ERROR(session->handles[group].Apply(HandleEvent::kReshard, group_name(group), rank));
  counters_.set_reshards(counters_.reshards() + 1);
  if (pooled_ && session->handles[group].users() == 0) {
    auto& deferred = ranks_[rank].deferred_unshards;
    if (auto it = std::find(deferred.begin(), deferred.end(), group); it != deferred.end()) {
      deferred.erase(it);  // it may hold the group all the same, by an earlier request
    }
    const size_t pool = PoolNumber(rank);
    if (const int slot = pools_[pool].slot_of(group); slot >= 0) {
      pool_done_[pool][slot][rank] = done;
    }
    pools_[pool].Release(rank, group);
    if (done == 0) {  // else its stream may wait for it
      ranks_[rank].awaited_unshards.erase(group);
    }
  }
  return absl::OkStatus();
}

}  // namespace shardd
