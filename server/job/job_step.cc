// Gradients, paired by name, and the step: reduced, decided, journaled, applied, committed.

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/shm/session_view.h"
#include "common/status/status_macros.h"
#include "server/job/job_core.h"
#include "server/observe/log.h"

namespace shardd {
namespace {

constexpr int kAllBackwards = std::numeric_limits<int>::max();
constexpr int kMaxBackwards = 1 << 14;  // of a step: what is paired is kept until the commit

}  // namespace

JobCore::Pair& JobCore::GetPair(PairKey key) {
  Pair& pair = pairs_[key];
  if (pair.submitted.empty()) {
    pair.waiting.resize(world_size());
    pair.submitted.assign(world_size(), 0);
    pair.folded.assign(world_size(), 0);
    pair.touched.assign(plan_->groups[key.second].params.size(), 0);
  }
  return pair;
}

absl::Status JobCore::OnSubmitGradients(Session* session, RankCommand command) {
  const int rank = session->rank();
  const int group = command.group;
  const GroupPlan& plan = plan_->groups[group];
  const std::string what = absl::StrCat("SubmitGradients group \"", group_name(group), "\"");
  RankStep& state = ranks_[rank];
  if (plan.gradient_slot < 0) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, what, "the group has nothing to train");
  }
  if (state.stepped || committing_) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, what, "the step is being committed");
  }
  const int slot = plan.gradient_slot;
  if (state.slot_holder[slot].has_value()) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, what,
                     absl::StrCat("gradient slot ", slot, " still holds group \"",
                                  group_name(state.slot_holder[slot]->second), "\"; wait for the slot first"));
  }
  const int bits = static_cast<int>(plan.params.size());
  Contribution contribution;
  contribution.fresh = command.fresh.empty() ? std::vector<bool>(bits, false) : std::move(command.fresh);
  contribution.present.resize(bits);
  for (int i = 0; i < bits; ++i) {
    const bool trainable = plan_->params[plan.params[i]].requires_grad;
    if (!trainable && !command.present.empty() && command.present[i]) {
      return RankError(
          absl::StatusCode::kInvalidArgument, rank, what,
          absl::StrCat("parameter \"", plan_->params[plan.params[i]].fqn, "\" is frozen but marked as present"));
    }
    contribution.present[i] = trainable && (command.present.empty() || command.present[i]);
  }
  SHARDD_RETURN_IF_ERROR(session->handles[group].Apply(HandleEvent::kSubmitGradients, group_name(group), rank));
  SHARDD_RETURN_IF_ERROR(Observe(session, {OrderEntry::Kind::kSubmitGradients, group}));
  counters_.set_gradient_submissions(counters_.gradient_submissions() + 1);
  const PairKey key(state.closed_backwards, group);
  Pair& pair = GetPair(key);
  pair.waiting[rank].push_back(std::move(contribution));
  ++pair.submitted[rank];
  state.slot_holder[slot] = key;
  SHARDD_RETURN_IF_ERROR(CheckNobodyFinished(rank, what));
  for (int other = 0; other < world_size(); ++other) {
    SHARDD_RETURN_IF_ERROR(CheckMissing(other, key, pair));
  }
  if (pooled_ && plan_->config.backward_prefetch() == v1::BACKWARD_PREFETCH_POST) {
    PrefetchNext(rank, OrderEntry::Kind::kUnshardBackward);
  }
  return TryReduce(key);
}

// A rank that has closed the backward without a group that others submitted.
absl::Status JobCore::CheckMissing(int rank, PairKey key, const Pair& pair) const {
  if (plan_->config.allow_missing_contribution() || ranks_[rank].closed_backwards <= key.first ||
      pair.submitted[rank] > 0) {
    return absl::OkStatus();
  }
  for (int other = 0; other < world_size(); ++other) {
    if (pair.submitted[other] > 0) {
      return RankError(
          absl::StatusCode::kFailedPrecondition, rank, "backward",
          absl::StrCat("rank ", rank, " closed backward ", key.first, " without SubmitGradients for group \"",
                       group_name(key.second), "\", which rank ", other,
                       " submitted; submit it (with an empty presence mask if there is no gradient), or set "
                       "allow_missing_contribution"));
    }
  }
  return absl::OkStatus();
}

absl::Status JobCore::OnBackwardDone(Session* session, int64_t index) {
  const int rank = session->rank();
  RankStep& state = ranks_[rank];
  if (state.stepped || index != state.closed_backwards) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, "BackwardDone",
                     state.stepped ? std::string("the rank has sent Step")
                                   : absl::StrCat("wrong index (got ", index, ", want ", state.closed_backwards, ")"));
  }
  for (size_t g = 0; g < session->handles.size(); ++g) {
    SHARDD_RETURN_IF_ERROR(
        session->handles[g].Apply(HandleEvent::kBackwardDone, group_name(static_cast<int>(g)), rank));
  }
  if (state.closed_backwards >= kMaxBackwards) {
    return RankError(absl::StatusCode::kResourceExhausted, rank, "BackwardDone",
                     absl::StrCat("too many backwards in one step (got ", state.closed_backwards + 1, ", want at most ",
                                  kMaxBackwards, "); step more often"));
  }
  const int closed = state.closed_backwards++;
  for (auto& [key, pair] : pairs_) {
    if (key.first == closed) {
      SHARDD_RETURN_IF_ERROR(CheckMissing(rank, key, pair));
      SHARDD_RETURN_IF_ERROR(TryReduce(key));
    }
  }
  return MaybeFold();
}

absl::Status JobCore::TryReduce(PairKey key) {
  Pair& pair = pairs_.at(key);
  while (true) {
    std::vector<int> ranks;
    bool any = false;
    for (int rank = 0; rank < world_size(); ++rank) {
      if (pair.folded[rank] > 0) {
        any = true;
      } else if (!pair.waiting[rank].empty()) {
        any = true;
        ranks.push_back(rank);
      } else if (ranks_[rank].closed_backwards <= key.first) {
        return absl::OkStatus();  // its contribution may still come
      }
    }
    if (!any) {
      return absl::OkStatus();
    }
    if (!ranks.empty()) {
      SHARDD_RETURN_IF_ERROR(IssueReduce(key, pair, ranks));
    }
    // The occurrence is complete; the next one, if the group was submitted again, has begun.
    for (int& folded : pair.folded) {
      folded = std::max(0, folded - 1);
    }
    pair.touched.assign(pair.touched.size(), 0);
  }
}

absl::Status JobCore::IssueReduce(PairKey key, Pair& pair, const std::vector<int>& ranks) {
  const int group = key.second;
  const GroupPlan& plan = plan_->groups[group];
  const size_t bits = plan.params.size();
  ReduceScatterRequest request;
  request.plan = plan_.get();
  request.group = group;
  request.gradients = memory_->pointers().gradients;
  request.reduce_dtype = plan_->config.mixed_precision().reduce_dtype();
  request.scale = gradient_scale_;
  request.label = absl::StrCat("reduce ", group_name(group), " step ", committed_step_ + 1);
  request.modes.assign(bits, GradientMode::kAccumulate);
  std::vector<std::shared_ptr<SessionMemory>>
      keep;  // slots are read until the work is done, whatever happens meanwhile
  for (size_t i = 0; i < bits; ++i) {
    int fresh_rank = -1;
    int adding_rank = -1;
    for (int rank : ranks) {
      const Contribution& contribution = pair.waiting[rank].front();
      if (contribution.present[i]) {
        (contribution.fresh[i] ? fresh_rank : adding_rank) = rank;
      }
    }
    const int param = plan.params[i];
    if (fresh_rank >= 0 && adding_rank >= 0) {
      return RankError(absl::StatusCode::kFailedPrecondition, fresh_rank,
                       absl::StrCat("SubmitGradients group \"", group_name(group), "\""),
                       absl::StrCat("gradient of \"", plan_->params[param].fqn, "\" replaces on rank ", fresh_rank,
                                    " and adds on rank ", adding_rank, "; all ranks must do the same"));
    }
    if (fresh_rank < 0 && adding_rank < 0) {
      continue;
    }
    const bool replaces = fresh_rank >= 0 && pair.touched[i] == 0;
    if (replaces || !present_[param]) {
      request.modes[i] = GradientMode::kOverwrite;
    }
    present_[param] = true;
    pair.touched[i] = 1;
  }
  for (int rank : ranks) {
    GradientSource source;
    source.rank = rank;
    source.slot = sessions_[rank]->slot(group);
    source.present = std::move(pair.waiting[rank].front().present);
    for (size_t i = 0; i < bits; ++i) {
      if (source.present[i]) {
        const ParamPlan& param = plan_->params[plan.params[i]];
        counters_.set_bytes_reduced(counters_.bytes_reduced() +
                                    param.numel * DTypeSizeBytes(plan_->flat_params[param.flat_param].unsharded_dtype));
      }
    }
    pair.waiting[rank].pop_front();
    request.sources.push_back(std::move(source));
    keep.push_back(sessions_[rank]->memory());
  }
  ++pending_reductions_;
  counters_.set_reductions(counters_.reductions() + 1);
  collective_->ReduceScatter(std::move(request),
                             Join(1, [this, group, ranks, keep = std::move(keep), epoch = epoch_](absl::Status status) {
                               if (epoch != epoch_ || closed_) {
                                 return;
                               }
                               --pending_reductions_;
                               if (status.ok()) {
                                 OnReduced(group, ranks);
                                 status = MaybeFold();
                               }
                               if (status.ok()) {
                                 status = MaybeDecide();
                               }
                               if (!status.ok() && epoch == epoch_) {
                                 Abort(std::move(status), {});
                               }
                             }));
  return absl::OkStatus();
}

void JobCore::OnReduced(int group, const std::vector<int>& ranks) {
  const int slot = plan_->groups[group].gradient_slot;
  for (int rank : ranks) {
    ranks_[rank].slot_holder[slot].reset();
    if (ranks_[rank].blocked_slot == slot) {
      ranks_[rank].blocked_slot = -1;
    }
    sessions_[rank]->PublishSlotReleased(slot);
  }
}

void JobCore::OnWaitGradientSlot(Session* session, int group) {
  const int slot = plan_->groups[group].gradient_slot;
  RankStep& state = ranks_[session->rank()];
  if (slot >= 0 && state.slot_holder[slot].has_value()) {
    state.blocked_slot = slot;
  }
}

// Ranks that run groups in different orders can come to hold each other up: each sleeps until a slot is released whose
// group another rank submits only later. Such a state is reached whatever the timing, so resolving it when, and only
// when, every rank is stuck keeps results the same on every run: what the stuck ranks have is added before its turn.
absl::Status JobCore::MaybeFold() {
  if (pending_reductions_ > 0 || committing_) {
    return absl::OkStatus();
  }
  bool blocked = false;
  for (int rank = 0; rank < world_size(); ++rank) {
    if (ranks_[rank].blocked_slot >= 0) {
      blocked = true;
    } else if (!ranks_[rank].stepped) {
      return absl::OkStatus();
    }
  }
  if (!blocked) {
    return absl::OkStatus();
  }
  for (int rank = 0; rank < world_size(); ++rank) {
    if (ranks_[rank].blocked_slot < 0) {
      continue;
    }
    const std::optional<PairKey> key = ranks_[rank].slot_holder[ranks_[rank].blocked_slot];
    if (!key.has_value()) {
      continue;
    }
    Pair& pair = pairs_.at(*key);
    if (pair.waiting[rank].empty()) {
      continue;  // folded for another stuck rank already
    }
    const int turn = pair.folded[rank];
    std::vector<int> ranks;
    for (int other = 0; other < world_size(); ++other) {
      if (pair.folded[other] != turn || pair.waiting[other].empty()) {
        continue;
      }
      const std::vector<bool>& fresh = pair.waiting[other].front().fresh;
      if (turn > 0 && std::find(fresh.begin(), fresh.end(), true) != fresh.end()) {
        return RankError(absl::StatusCode::kFailedPrecondition, other,
                         absl::StrCat("SubmitGradients group \"", group_name(key->second), "\""),
                         "a gradient that replaces cannot be added before its turn, and all ranks wait for each other; "
                         "submit groups in the same order on all ranks");
      }
      ranks.push_back(other);
    }
    counters_.set_early_folds(counters_.early_folds() + 1);
    SHARDD_RETURN_IF_ERROR(IssueReduce(*key, pair, ranks));
    for (int other : ranks) {
      ++pair.folded[other];
    }
  }
  return absl::OkStatus();
}

absl::Status JobCore::OnStep(Session* session, v1::Step step) {
  const int rank = session->rank();
  RankStep& state = ranks_[rank];
  if (version_ == 0 || state.stepped || committing_ || state.full_params) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, "Step",
                     version_ == 0       ? "the job has no parameters yet"
                     : state.full_params ? "the rank is inside EnterFullParams"
                                         : "the rank has already sent Step for this step");
  }
  SHARDD_RETURN_IF_ERROR(CheckNobodyFinished(rank, "Step"));
  if (static_cast<int64_t>(step.trainer_state().size()) > kMaxTrainerStateBytes) {
    return RankError(absl::StatusCode::kInvalidArgument, rank, "Step",
                     absl::StrCat("trainer state is too large (got ", step.trainer_state().size(), ", want at most ",
                                  kMaxTrainerStateBytes, " bytes)"));
  }
  if (absl::Status status = CheckHyperParameters(*plan_, step); !status.ok()) {
    return RankError(status.code(), rank, "Step", status.message());
  }
  for (size_t g = 0; g < session->handles.size(); ++g) {
    SHARDD_RETURN_IF_ERROR(session->handles[g].Apply(HandleEvent::kStep, group_name(static_cast<int>(g)), rank));
  }
  for (const auto& [key, pair] : pairs_) {
    if (key.first == state.closed_backwards && pair.submitted[rank] > 0) {
      return RankError(absl::StatusCode::kFailedPrecondition, rank, "Step",
                       absl::StrCat("backward ", key.first, " is still open; call BackwardDone first"));
    }
  }
  state.stepped = true;
  state.step = std::move(step);
  state.closed_backwards = kAllBackwards;
  step_orders_[rank] = orders_[rank].sequence();
  orders_[rank].BeginStep(captured_ ? &captured_order_ : nullptr);
  for (auto& [key, pair] : pairs_) {
    SHARDD_RETURN_IF_ERROR(CheckMissing(rank, key, pair));
    SHARDD_RETURN_IF_ERROR(TryReduce(key));
  }
  SHARDD_RETURN_IF_ERROR(MaybeFold());
  return MaybeDecide();
}

absl::Status JobCore::CompareSteps() const {
  const v1::Step& first = ranks_[0].step;
  for (int rank = 1; rank < world_size(); ++rank) {
    const v1::Step& other = ranks_[rank].step;
    std::string difference;
    if (other.max_grad_norm() != first.max_grad_norm()) {
      difference = absl::StrCat("max_grad_norm (got ", other.max_grad_norm(), ", want ", first.max_grad_norm(), ")");
    }
    for (int g = 0; difference.empty() && g < first.groups_size(); ++g) {
      if (other.groups(g).SerializeAsString() != first.groups(g).SerializeAsString()) {
        difference = absl::StrCat("optimizer group ", g, " (got {", other.groups(g).ShortDebugString(), "}, want {",
                                  first.groups(g).ShortDebugString(), "})");
      }
    }
    if (!difference.empty()) {
      return RankError(absl::StatusCode::kFailedPrecondition, rank, "Step",
                       absl::StrCat("hyperparameters of rank ", rank, " differ from rank 0's: ", difference));
    }
  }
  return absl::OkStatus();
}

// In the first step there is no recorded order yet: ranks are held against rank 0.
absl::Status JobCore::CompareOrders() {
  if (captured_) {
    return absl::OkStatus();
  }
  for (int rank = 1; rank < world_size(); ++rank) {
    OrderTracker tracker;
    tracker.BeginStep(&step_orders_[0]);
    for (const OrderEntry& entry : step_orders_[rank]) {
      const OrderTracker::Observation seen = tracker.Observe(entry);
      if (!seen.departed) {
        continue;
      }
      counters_.set_departures(counters_.departures() + 1);
      ++sessions_[rank]->departures;
      const std::string fact = absl::StrCat(
          "departs from rank 0's order in the first step (got group \"", group_name(entry.group), "\", want ",
          seen.expected.has_value() ? absl::StrCat("\"", group_name(seen.expected->group), "\"") : "nothing more", ")");
      Event(rank, "departure", fact);
      if (plan_->config.strict_order()) {
        return RankError(absl::StatusCode::kFailedPrecondition, rank, "strict order", fact);
      }
    }
  }
  return absl::OkStatus();
}

absl::Status JobCore::MaybeDecide() {
  if (deciding_ || committing_ || pending_reductions_ > 0 || pending_fills_ > 0 ||
      !std::all_of(ranks_.begin(), ranks_.end(), [](const RankStep& r) { return r.stepped; })) {
    return absl::OkStatus();
  }
  SHARDD_RETURN_IF_ERROR(CompareSteps());
  SHARDD_RETURN_IF_ERROR(CompareOrders());
  deciding_ = true;
  Decide();
  return absl::OkStatus();
}

void JobCore::Decide() {
  if (ranks_[0].step.max_grad_norm() <= 0) {
    Apply(0);
    return;
  }
  auto squares = std::make_shared<std::vector<double>>(world_size(), 0.0);
  auto done = Join(world_size(), [this, squares, epoch = epoch_](absl::Status status) {
    if (epoch != epoch_ || closed_) {
      return;
    }
    if (!status.ok()) {
      Abort(std::move(status), {});
      return;
    }
    double sum = 0;
    for (double square : *squares) {  // in rank order
      sum += square;
    }
    Apply(std::sqrt(sum));
  });
  for (int rank = 0; rank < world_size(); ++rank) {
    DeviceWork work;
    work.label = absl::StrCat("norm step ", committed_step_ + 1);
    work.ops = NormOps(*plan_, memory_->pointers(), present_, rank, &(*squares)[rank]);
    work.done = done;
    devices_[rank]->Submit(StreamId::kOptimizer, std::move(work));
  }
}

void JobCore::Apply(double norm) {
  const v1::Step& step = ranks_[0].step;
  grad_norm_ = norm;
  decided_.groups.assign(step.groups().begin(), step.groups().end());
  decided_.clip_factor = ClipFactor(norm, step.max_grad_norm());
  decided_.present = present_;
  decided_.step_counts = step_counts_;
  v1::DecidedStepRecord record;
  record.set_epoch(epoch_);
  record.set_step(committed_step_ + 1);
  *record.mutable_groups() = step.groups();
  record.set_clip_factor(decided_.clip_factor);
  record.set_grad_norm(norm);
  std::string present(MaskBytes(static_cast<int64_t>(present_.size())), '\0');
  for (size_t i = 0; i < present_.size(); ++i) {
    SetMaskBit(reinterpret_cast<uint8_t*>(present.data()), static_cast<int64_t>(i), present_[i]);
  }
  record.set_present(std::move(present));
  record.mutable_step_counts()->Add(step_counts_.begin(), step_counts_.end());
  for (const RankStep& rank : ranks_) {
    record.add_trainer_states(rank.step.trainer_state());
  }
  if (absl::Status status = journal_->WriteDecided(record); !status.ok()) {
    Abort(std::move(status), {});  // nothing has changed yet
    return;
  }
  committing_ = true;
  auto done = Join(world_size(), [this](absl::Status status) {
    if (!status.ok()) {
      // Device work fails only when the daemon is going down; shards may be torn.
      LogError(absl::StrCat("job ", name(), ": update of step ", committed_step_ + 1, ": ", status.message()));
      committing_ = false;
      Close(absl::StrCat("update of step ", committed_step_ + 1, ": ", status.message()));
      return;
    }
    Commit();
  });
  for (int rank = 0; rank < world_size(); ++rank) {
    DeviceWork work;
    work.label = absl::StrCat("update step ", committed_step_ + 1);
    work.ops = UpdateOps(*plan_, memory_->pointers(), decided_, rank);
    work.done = done;
    devices_[rank]->Submit(StreamId::kOptimizer, std::move(work));
  }
}

void JobCore::Commit() {
  if (closed_) {
    return;
  }
  for (size_t i = 0; i < present_.size(); ++i) {
    if (decided_.present[i]) {
      ++step_counts_[i];
      counters_.set_bytes_updated(counters_.bytes_updated() +
                                  plan_->params[i].numel * DTypeSizeBytes(plan_->params[i].dtype));
    }
  }
  for (int rank = 0; rank < world_size(); ++rank) {
    trainer_states_[rank] = std::move(*ranks_[rank].step.mutable_trainer_state());
  }
  if (!captured_) {
    captured_order_ = step_orders_[0];
    captured_ = !captured_order_.empty();
    if (captured_) {
      for (OrderTracker& tracker : orders_) {
        tracker.SetCaptured(&captured_order_);
      }
    }
  }
  ++committed_step_;
  ++version_;
  counters_.set_commits(counters_.commits() + 1);
  if (absl::Status status = journal_->WriteHeader({epoch_, committed_step_, version_}); !status.ok()) {
    LogError(absl::StrCat("job ", name(), ": ", status.message()));
  }
  committing_ = false;
  deciding_ = false;
  pairs_.clear();
  present_.assign(present_.size(), false);
  for (RankStep& rank : ranks_) {
    rank.stepped = false;
    rank.closed_backwards = 0;
    rank.step.Clear();
  }
  if (pool_ != nullptr) {
    pool_->Invalidate();
  }
  v1::SessionEvent event;
  event.mutable_committed()->set_step(committed_step_);
  event.mutable_committed()->set_grad_norm(grad_norm_);
  event.mutable_committed()->set_clip_factor(decided_.clip_factor);
  event.mutable_committed()->set_version(version_);
  for (const auto& session : sessions_) {
    if (session != nullptr && session->stream != nullptr) {
      session->stream->Send(event);
    }
  }
  AfterCommit();
}

// The new version is there: whoever waits for it is let go, then what had to wait for the commit is done.
void JobCore::AfterCommit() {
  for (const auto& session : sessions_) {
    if (session != nullptr) {
      session->PublishVersion(version_);
    }
  }
  if (pending_abort_.has_value()) {
    auto [cause, lost] = *std::move(pending_abort_);
    pending_abort_.reset();
    Abort(std::move(cause), std::move(lost));
    return;
  }
  const uint64_t epoch = epoch_;
  for (int rank = 0; rank < world_size(); ++rank) {
    if (const std::optional<bool> finished = std::exchange(ranks_[rank].pending_detach, std::nullopt);
        finished.has_value() && sessions_[rank] != nullptr) {
      Detach(rank, *finished);
    }
    if (epoch_ != epoch) {
      return;
    }
  }
  MaybeGrantFullParams();
  for (int rank = 0; rank < world_size() && pooled_; ++rank) {
    while (!ranks_[rank].deferred_unshards.empty()) {
      const int group = ranks_[rank].deferred_unshards.front();
      ranks_[rank].deferred_unshards.pop_front();
      if (absl::Status status = UnshardIntoPool(rank, group); !status.ok()) {
        Abort(std::move(status), {});
        return;
      }
    }
  }
}

}  // namespace shardd
