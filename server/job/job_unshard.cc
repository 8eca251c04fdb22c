// Unshard and reshard: what ranks may request, and what is published and submitted of what unshard/ decides.

#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/job_core.h"

namespace shardd {

absl::Status JobCore::OnUnshard(Session* session, int group, int64_t phase) {
  const int rank = session->rank();
  if (committed_.version() == 0) {
    return committed_.RankError(absl::StatusCode::kFailedPrecondition, rank,
                                absl::StrCat("Unshard group \"", group_name(group), "\""),
                                "the job has no parameters yet; write them and CommitParameters first");
  }
  // Overtaken: sent before the rank paused once more.
  const bool begins = writes_.passes().announced() && writes_.passes().entering(rank);  // its client has gone on
  if (writes_.trainers_write() && !writes_.passes().inside(rank) && !writes_.hand_ins().overtaken(rank) && !begins) {
    return committed_.RankError(absl::StatusCode::kFailedPrecondition, rank,
                                absl::StrCat("Unshard group \"", group_name(group), "\""),
                                "the rank is outside of a pass; EnterPass first");
  }
  if (phase != v1::PHASE_FORWARD && phase != v1::PHASE_BACKWARD) {
    return committed_.RankError(absl::StatusCode::kInvalidArgument, rank,
                                absl::StrCat("Unshard group \"", group_name(group), "\""),
                                absl::StrCat("unknown phase (got ", phase, ", want 1 or 2)"));
  }
  const bool forward = phase == v1::PHASE_FORWARD;
  SHARDD_RETURN_IF_ERROR(session->handles[group].Apply(
      forward ? HandleEvent::kUnshardForward : HandleEvent::kUnshardBackward, group_name(group), rank));
  counters_.set_unshards(counters_.unshards() + 1);
  const OrderEntry::Kind kind = forward ? OrderEntry::Kind::kUnshardForward : OrderEntry::Kind::kUnshardBackward;
  SHARDD_RETURN_IF_ERROR(Observe(rank, {kind, group}));
  if (!unshards_.pooled()) {
    // The version's word tells the client when it may read; nothing else has to happen.
    return session->handles[group].Apply(HandleEvent::kUnshardDone, group_name(group), rank);
  }
  unshards_.Ask(rank, group);
  if (steps_.stepped(rank) || decision_.committing() || begins) {
    // It asks for the version that is being made.
    return absl::OkStatus();
  }
  SHARDD_RETURN_IF_ERROR(GrantUnshards(rank));
  if (unshards_.Waits(rank)) {
    return absl::OkStatus();  // there is no slot for it, so none for what would be prefetched
  }
  if (forward ? plan_->config.forward_prefetch() : plan_->config.backward_prefetch() == v1::BACKWARD_PREFETCH_PRE) {
    return PrefetchNext(rank, kind);
  }
  return absl::OkStatus();
}

absl::Status JobCore::Observe(int rank, OrderEntry entry) {
  const std::optional<Departure> departure = orders_.Observe(rank, entry);
  return departure.has_value() ? Departed(*departure) : absl::OkStatus();
}

absl::Status JobCore::CompareOrders() {
  return orders_.CompareFirstStep([this](const Departure& departure) { return Departed(departure); });
}

absl::Status JobCore::Departed(const Departure& departure) {
  counters_.set_departures(counters_.departures() + 1);
  ++sessions_[departure.rank]->departures;
  if (!departure.event.empty()) {
    events_.Add(departure.rank, "departure", departure.event);
  }
  return plan_->config.strict_order() ? committed_.RankError(absl::StatusCode::kFailedPrecondition, departure.rank,
                                                             "strict order", departure.fact)
                                      : absl::OkStatus();
}

absl::Status JobCore::GrantUnshards(int rank) {
  if (decision_.committing() || (writes_.pass_copies() && writes_.passes().entering(rank))) {
    return absl::OkStatus();  // what it is to read is being made
  }
  for (;;) {
    SHARDD_ASSIGN_OR_RETURN(const std::optional<PooledUnshards::Grant> grant, unshards_.GrantNext(rank));
    if (!grant.has_value()) {
      return absl::OkStatus();
    }
    if (grant->prefetched) {
      counters_.set_prefetch_hits(counters_.prefetch_hits() + 1);
    }
    if (grant->fill.has_value()) {
      SHARDD_RETURN_IF_ERROR(FillSlot(*grant->fill));
    }
    Session* session = sessions_[rank].get();
    session->words().PublishUnshardIssued(grant->group, grant->asked, grant->offset_bytes);
    if (grant->there) {
      session->words().PublishUnsharded(grant->group, grant->asked);
      SHARDD_RETURN_IF_ERROR(
          session->handles[grant->group].Apply(HandleEvent::kUnshardDone, group_name(grant->group), rank));
    }
  }
}

absl::Status JobCore::PrefetchNext(int rank, OrderEntry::Kind kind) {
  const std::optional<int32_t> next = orders_.NextUnshard(rank, kind);
  if (!next.has_value()) {
    return absl::OkStatus();
  }
  const PooledUnshards::Prefetched prefetched = unshards_.Prefetch(rank, *next);
  if (prefetched.granted) {
    counters_.set_prefetches(counters_.prefetches() + 1);
  }
  return prefetched.fill.has_value() ? FillSlot(*prefetched.fill) : absl::OkStatus();
}

absl::Status JobCore::FillSlot(const PoolFill& fill) {
  Held held;
  held.order = Held::Order::kFills;
  held.what = absl::StrCat("Unshard group \"", group_name(fill.group), "\"");
  for (const auto& [rank, done] : unshards_.ReadersBefore(fill)) {
    held.signals.push_back(given_back_.SignalOf(rank, done));
  }
  held.run = [this, fill] {
    SubmitFill(fill);
    return absl::OkStatus();
  };
  held.dropped = [this, fill] { (void)unshards_.Filled(fill); };  // nothing writes into it
  return given_back_.When(std::move(held));
}

void JobCore::SubmitFill(const PoolFill& fill) {
  counters_.set_unshard_copies(counters_.unshard_copies() + 1);
  AllGatherRequest request;
  request.plan = plan_.get();
  request.group = fill.group;
  request.shards = memory_->pointers().shards;
  request.parameters = memory_->pointers().parameters;
  request.destination = memory_->pool()->At(unshards_.OffsetBytes(fill.pool, fill.slot));
  if (unshards_.pools() > 1) {
    request.reader = static_cast<int>(fill.pool);  // the first of its ranks; all are at one device
    request.boundaries = memory_->shards_boundaries();
  }
  request.label = absl::StrCat("unshard ", group_name(fill.group), " version ", committed_.version());
  const auto filled =
      Join(node_gathers_ != nullptr ? 2 : 1, [this, fill](absl::Status status) { OnFilled(fill, std::move(status)); });
  if (node_gathers_ != nullptr) {
    node_gathers_->Gather(
        {fill.group, committed_.version(), request.destination, request.label, filled, /*since=*/MonotonicNow()});
  }
  collective_->AllGather(std::move(request), filled);
}

void JobCore::OnFilled(const PoolFill& fill, absl::Status status) {
  const bool is_of_epoch = unshards_.IsOfEpoch(fill);
  const std::vector<PooledUnshards::There> there = unshards_.Filled(fill);
  if (closed_) {
    return;
  }
  if (is_of_epoch && !status.ok()) {
    Abort(std::move(status), {});
    return;
  }
  for (const PooledUnshards::There& unshard : there) {
    if (Session* session = sessions_[unshard.rank].get(); session != nullptr) {
      session->words().PublishUnsharded(unshard.group, unshard.asked);
      (void)session->handles[unshard.group].Apply(HandleEvent::kUnshardDone, group_name(unshard.group), unshard.rank);
    }
  }
}

absl::Status JobCore::RetryUnshards() {
  const std::vector<bool> retries = unshards_.TakeRetries();
  for (int rank = 0; rank < world_size(); ++rank) {
    if (retries[unshards_.pool_of(rank)] && sessions_[rank] != nullptr && !steps_.stepped(rank)) {
      SHARDD_RETURN_IF_ERROR(GrantUnshards(rank));
    }
  }
  return absl::OkStatus();
}

absl::Status JobCore::OnReshard(Session* session, int group, uint64_t done) {
  const int rank = session->rank();
  SHARDD_RETURN_IF_ERROR(session->handles[group].Apply(HandleEvent::kReshard, group_name(group), rank));
  counters_.set_reshards(counters_.reshards() + 1);
  if (session->handles[group].users() == 0) {
    unshards_.Reshard(rank, group, done);
  }
  return absl::OkStatus();
}

}  // namespace shardd
