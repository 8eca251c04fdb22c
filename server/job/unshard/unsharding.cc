#include "server/job/unshard/unsharding.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/clock/monotonic_now.h"
#include "common/status/status_macros.h"
#include "server/collective/collective.h"
#include "server/job/job_events.h"
#include "server/job/membership/sessions.h"
#include "server/job/step/asked_steps.h"
#include "server/job/step/committed.h"
#include "server/job/step/step_decision.h"
#include "server/job/unshard/node_gathers.h"
#include "server/job/work/given_back.h"
#include "server/job/work/job_work.h"
#include "server/job/writes/trainer_writes.h"
#include "server/session/session.h"
#include "server/storage/job_memory.h"
#include "server/storage/job_slab.h"

namespace shardd {

Unsharding::Unsharding(std::shared_ptr<const ShardPlan> plan, Facts facts, Services services)
    : plan_(std::move(plan)), see_(facts), use_(std::move(services)), orders_(plan_), unshards_(plan_) {}

absl::Status Unsharding::CheckMayUnshard(int rank, int group, int64_t phase, bool begins) const {
  std::string fact;
  absl::StatusCode code = absl::StatusCode::kFailedPrecondition;
  if (see_.committed->version() == 0) {
    fact = "the job has no parameters yet; write them and CommitParameters first";
  } else if (see_.writes->trainers_write() && !see_.writes->passes().inside(rank) && !begins) {
    fact = "the rank is outside of a pass; EnterPass first";
  } else if (phase != v1::PHASE_FORWARD && phase != v1::PHASE_BACKWARD) {
    code = absl::StatusCode::kInvalidArgument;
    fact = absl::StrCat("unknown phase (got ", phase, ", want 1 or 2)");
  } else {
    return absl::OkStatus();
  }
  return see_.committed->RankError(code, rank, absl::StrCat("Unshard group \"", group_name(group), "\""), fact);
}

absl::Status Unsharding::Unshard(Session* session, int group, int64_t phase) {
  const int rank = session->rank();
  const bool begins =
      see_.writes->passes().announced() && see_.writes->passes().entering(rank);  // its client has gone on
  SHARDD_RETURN_IF_ERROR(CheckMayUnshard(rank, group, phase, begins));
  const bool forward = phase == v1::PHASE_FORWARD;
  SHARDD_RETURN_IF_ERROR(session->handles[group].Apply(
      forward ? HandleEvent::kUnshardForward : HandleEvent::kUnshardBackward, group_name(group), rank));
  use_.counters->set_unshards(use_.counters->unshards() + 1);
  const OrderEntry::Kind kind = forward ? OrderEntry::Kind::kUnshardForward : OrderEntry::Kind::kUnshardBackward;
  SHARDD_RETURN_IF_ERROR(Observe(rank, {kind, group}));
  if (!unshards_.pooled()) {
    // The version's word tells the client when it may read; nothing else has to happen.
    return session->handles[group].Apply(HandleEvent::kUnshardDone, group_name(group), rank);
  }
  unshards_.Ask(rank, group);
  if (see_.steps->stepped(rank) || see_.decision->committing() || begins) {
    // It asks for the version that is being made.
    return absl::OkStatus();
  }
  SHARDD_RETURN_IF_ERROR(GrantNext(rank));
  if (unshards_.Waits(rank)) {
    return absl::OkStatus();  // there is no slot for it, so none for what would be prefetched
  }
  return PrefetchBehind(rank, kind);
}

absl::Status Unsharding::Observe(int rank, OrderEntry entry) {
  const std::optional<Departure> departure = orders_.Observe(rank, entry);
  return departure.has_value() ? Departed(*departure) : absl::OkStatus();
}

absl::Status Unsharding::CompareOrders() {
  return orders_.CompareFirstStep([this](const Departure& departure) { return Departed(departure); });
}

absl::Status Unsharding::Departed(const Departure& departure) {
  use_.counters->set_departures(use_.counters->departures() + 1);
  ++(*see_.sessions)[departure.rank]->departures;
  if (!departure.event.empty()) {
    use_.events->Add(departure.rank, "departure", departure.event);
  }
  return plan_->config.strict_order() ? see_.committed->RankError(absl::StatusCode::kFailedPrecondition, departure.rank,
                                                                  "strict order", departure.fact)
                                      : absl::OkStatus();
}

absl::Status Unsharding::GrantNext(int rank) {
  if (see_.decision->committing() || (see_.writes->pass_copies() && see_.writes->passes().entering(rank))) {
    return absl::OkStatus();  // what it is to read is being made
  }
  for (;;) {
    SHARDD_ASSIGN_OR_RETURN(const std::optional<PooledUnshards::Grant> grant, unshards_.GrantNext(rank));
    if (!grant.has_value()) {
      return absl::OkStatus();
    }
    if (grant->prefetched) {
      use_.counters->set_prefetch_hits(use_.counters->prefetch_hits() + 1);
    }
    if (grant->fill.has_value()) {
      SHARDD_RETURN_IF_ERROR(FillSlot(*grant->fill));
    }
    Session* session = (*see_.sessions)[rank].get();
    session->words().PublishUnshardIssued(grant->group, grant->asked, grant->offset_bytes);
    if (grant->there) {
      session->words().PublishUnsharded(grant->group, grant->asked);
      SHARDD_RETURN_IF_ERROR(
          session->handles[grant->group].Apply(HandleEvent::kUnshardDone, group_name(grant->group), rank));
    }
  }
}

absl::Status Unsharding::PrefetchBehind(int rank, OrderEntry::Kind request) {
  const std::optional<OrderEntry::Kind> kind = PrefetchedBehind(request, plan_->config);
  const std::optional<int32_t> next = kind.has_value() ? orders_.NextUnshard(rank, *kind) : std::nullopt;
  if (!next.has_value()) {
    return absl::OkStatus();
  }
  const PooledUnshards::Prefetched prefetched = unshards_.Prefetch(rank, *next);
  if (prefetched.granted) {
    use_.counters->set_prefetches(use_.counters->prefetches() + 1);
  }
  return prefetched.fill.has_value() ? FillSlot(*prefetched.fill) : absl::OkStatus();
}

absl::Status Unsharding::FillSlot(const PoolFill& fill) {
  Held held;
  held.order = Held::Order::kFills;
  held.what = absl::StrCat("Unshard group \"", group_name(fill.group), "\"");
  for (const auto& [rank, done] : unshards_.ReadersBefore(fill)) {
    held.signals.push_back(use_.given_back->SignalOf(rank, done));
  }
  held.run = [this, fill] {
    SubmitFill(fill);
    return absl::OkStatus();
  };
  held.dropped = [this, fill] { (void)unshards_.Filled(fill); };  // nothing writes into it
  return use_.given_back->When(std::move(held));
}

void Unsharding::SubmitFill(const PoolFill& fill) {
  use_.counters->set_unshard_copies(use_.counters->unshard_copies() + 1);
  AllGatherRequest request;
  request.plan = plan_.get();
  request.group = fill.group;
  request.shards = see_.memory->pointers().shards;
  request.parameters = see_.memory->pointers().parameters;
  request.destination = see_.memory->pool()->At(unshards_.OffsetBytes(fill.pool, fill.slot));
  if (unshards_.pools() > 1) {
    request.reader = static_cast<int>(fill.pool);  // the first of its ranks; all are at one device
    request.boundaries = see_.memory->shards_boundaries();
  }
  request.label = absl::StrCat("unshard ", group_name(fill.group), " version ", see_.committed->version());
  const auto filled = use_.work->Join(gathers_ != nullptr ? 2 : 1,
                                      [this, fill](absl::Status status) { OnFilled(fill, std::move(status)); });
  if (gathers_ != nullptr) {
    gathers_->Gather(
        {fill.group, see_.committed->version(), request.destination, request.label, filled, /*since=*/MonotonicNow()});
  }
  use_.collective->AllGather(std::move(request), filled);
}

void Unsharding::OnFilled(const PoolFill& fill, absl::Status status) {
  const bool is_of_epoch = unshards_.IsOfEpoch(fill);
  const std::vector<PooledUnshards::There> there = unshards_.Filled(fill);
  if (is_of_epoch && !status.ok()) {
    use_.job->Fail(std::move(status));
    return;
  }
  for (const PooledUnshards::There& unshard : there) {
    if (Session* session = (*see_.sessions)[unshard.rank].get(); session != nullptr) {
      session->words().PublishUnsharded(unshard.group, unshard.asked);
      (void)session->handles[unshard.group].Apply(HandleEvent::kUnshardDone, group_name(unshard.group), unshard.rank);
    }
  }
}

absl::Status Unsharding::Retry() {
  const std::vector<bool> retries = unshards_.TakeRetries();
  for (int rank = 0; rank < world_size(); ++rank) {
    if (retries[unshards_.pool_of(rank)] && (*see_.sessions)[rank] != nullptr && !see_.steps->stepped(rank)) {
      SHARDD_RETURN_IF_ERROR(GrantNext(rank));
    }
  }
  return absl::OkStatus();
}

absl::Status Unsharding::Reshard(Session* session, int group, uint64_t done) {
  const int rank = session->rank();
  SHARDD_RETURN_IF_ERROR(session->handles[group].Apply(HandleEvent::kReshard, group_name(group), rank));
  use_.counters->set_reshards(use_.counters->reshards() + 1);
  if (session->handles[group].users() == 0) {
    unshards_.Reshard(rank, group, done);
  }
  return absl::OkStatus();
}

absl::Status Unsharding::GradientsSubmitted(int rank, int group) {
  SHARDD_RETURN_IF_ERROR(Observe(rank, {OrderEntry::Kind::kSubmitGradients, group}));
  return pooled() ? PrefetchBehind(rank, OrderEntry::Kind::kSubmitGradients) : absl::OkStatus();
}

void Unsharding::Abandon(int rank, uint64_t done) {
  unshards_.GiveUp(rank, done);
  orders_.AbandonBackward(rank);
}

void Unsharding::Forget(int rank) {
  orders_.ForgetStep(rank);
  unshards_.Leave(rank);
}

// What lies in the pool is of the version before; who waits for this one may be granted what it asked for.
void Unsharding::VersionCommitted() {
  unshards_.NewVersion();
  unshards_.RetryAll();
}

void Unsharding::EndEpoch() {
  orders_.EndEpoch();
  unshards_.EndEpoch();
}

void Unsharding::SessionEnds(Session* session) { unshards_.EndSession(session->rank()); }

}  // namespace shardd
