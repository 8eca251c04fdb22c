// Gradients as they come: paired by (backward, group, occurrence), never by position. job_reduce.cc adds them.

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

Pair& JobCore::GetPair(PairKey key) {
  Pair& pair = pairs_[key];
  if (pair.submitted.empty()) {
    pair.waiting.resize(world_size());
    pair.submitted.assign(world_size(), 0);
    pair.added.assign(world_size(), 0);
    pair.stays.assign(world_size(), 0);
    pair.folded.assign(world_size(), 0);
    pair.touched.assign(plan_->groups[key.second].params.size(), 0);
    pair.own.assign(plan_->groups[key.second].params.size(), 0);
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
  contribution.done = command.done;
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
  state.abandoned.erase(key.first);
  state.slot_holder[slot] = key;
  SHARDD_RETURN_IF_ERROR(CheckNobodyFinished(rank, what, key.first));
  for (int other = 0; other < world_size(); ++other) {
    SHARDD_RETURN_IF_ERROR(CheckMissing(other, key, pair));
  }
  if (pooled_ && plan_->config.backward_prefetch() == v1::BACKWARD_PREFETCH_POST) {
    SHARDD_RETURN_IF_ERROR(PrefetchNext(rank, OrderEntry::Kind::kUnshardBackward));
  }
  return TryReduce(key);
}

// A rank that has closed the backward without a group that others submitted.
absl::Status JobCore::CheckMissing(int rank, PairKey key, const Pair& pair) const {
  if (plan_->config.allow_missing_contribution() || ranks_[rank].closed_backwards <= key.first ||
      pair.submitted[rank] > 0 || ranks_[rank].abandoned.count(key.first) > 0) {
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

absl::Status JobCore::OnBackwardDone(Session* session, const RankCommand& command) {
  const int64_t index = command.arg0;
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
  SHARDD_RETURN_IF_ERROR(CheckNobodyFinished(rank, "BackwardDone", state.closed_backwards));
  const int closed = state.closed_backwards++;
  state.done_at_close.push_back(command.done);
  session->CountBackward();
  orders_[rank].Mark();
  for (auto it = pairs_.lower_bound({closed, 0}); it != pairs_.end() && it->first.first == closed;) {
    const PairKey key = (it++)->first;
    SHARDD_RETURN_IF_ERROR(CheckMissing(rank, key, pairs_.at(key)));
    SHARDD_RETURN_IF_ERROR(TryReduce(key));
    ForgetIfClosed(key);
  }
  MaybeSayClosed();
  PublishReduced();
  ReadmitLate();
  return MaybeFold();
}

// A backward that all ranks have closed has nothing waiting; what it has under way ends together.
void JobCore::PublishReduced() {
  int closed = std::numeric_limits<int>::max();
  for (const RankStep& rank : ranks_) {
    closed = std::min(closed, rank.closed_backwards);
  }
  if (nodes_ != nullptr) {
    closed = std::min(closed, nodes_closed_);
  }
  for (const auto& session : sessions_) {
    if (session != nullptr) {
      if (trainers_ == nullptr) {
        session->PublishReducing(closed);
      }
      if (pending_reductions_ == 0) {
        session->PublishReduced(closed);
        session->PublishReducing(closed);
      }
    }
  }
  if (pending_reductions_ > 0) {
    return;
  }
  EndFinishedLater();
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

}  // namespace shardd
