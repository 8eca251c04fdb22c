// Gradients, paired by (backward, group, occurrence), never by position.

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/job_core.h"

namespace shardd {
namespace {

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
  gradients_seen_ = true;
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
  session->CountBackward();
  for (auto it = pairs_.lower_bound({closed, 0}); it != pairs_.end() && it->first.first == closed;) {
    const PairKey key = (it++)->first;
    SHARDD_RETURN_IF_ERROR(CheckMissing(rank, key, pairs_.at(key)));
    SHARDD_RETURN_IF_ERROR(TryReduce(key));
    ForgetIfClosed(key);
  }
  PublishReduced();
  return MaybeFold();
}

// A backward that all ranks have closed has nothing waiting; what it has under way ends together.
void JobCore::PublishReduced() {
  if (pending_reductions_ > 0) {
    return;
  }
  int closed = std::numeric_limits<int>::max();
  for (const RankStep& rank : ranks_) {
    closed = std::min(closed, rank.closed_backwards);
  }
  for (const auto& session : sessions_) {
    if (session != nullptr) {
      session->PublishReduced(closed);
    }
  }
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

// Nothing can come for it any more. Also what keeps a step of many backwards small.
void JobCore::ForgetIfClosed(PairKey key) {
  const Pair& pair = pairs_.at(key);
  for (int rank = 0; rank < world_size(); ++rank) {
    if (ranks_[rank].closed_backwards <= key.first || !pair.waiting[rank].empty()) {
      return;
    }
  }
  pairs_.erase(key);
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
  collective_->ReduceScatter(std::move(request), Join(1, [this, group, ranks, keep = std::move(keep),
                                                          epoch = epoch_](absl::Status status) mutable {
                               if (epoch != epoch_ || closed_) {
                                 reaper_->Post([gone = std::move(keep)] {});
                                 return;
                               }
                               --pending_reductions_;
                               if (status.ok()) {
                                 OnReduced(group, ranks);
                                 PublishReduced();
                                 status = MaybeFold();
                               }
                               if (status.ok()) {
                                 status = MaybeDecide();
                               }
                               if (status.ok() && epoch == epoch_) {
                                 status = MaybeBeginPass();
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
    } else if (!ranks_[rank].stepped && !(ranks_[rank].pass == Pass::kEntering && ranks_[rank].pass_stepped)) {
      return absl::OkStatus();
    }
  }
  if (!blocked) {
    return absl::OkStatus();
  }
  const auto older_open = [this](int backward) {
    return std::any_of(ranks_.begin(), ranks_.end(),
                       [backward](const RankStep& r) { return r.closed_backwards < backward; });
  };
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
      if ((turn > 0 || older_open(key->first)) && std::find(fresh.begin(), fresh.end(), true) != fresh.end()) {
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

}  // namespace shardd
