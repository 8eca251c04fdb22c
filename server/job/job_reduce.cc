// Gradients are added: an occurrence of a group in a backward at a time, when every rank has given its part or none.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/job_core.h"

namespace shardd {
namespace {

// A file takes one write at a time, so beyond so many ranks' devices what was given back comes back by faults.
constexpr int kRanksOfOneFile = 4;

}  // namespace

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
    if (nodes_ != nullptr) {
      if (!ranks.empty() && !pair.said) {
        SayReady(key, pair, ranks);
      }
      return absl::OkStatus();  // NodeGo goes on
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

// A rank that gave a backward up and does it again counts once per group in it: its first contribution cannot be taken
// out of the sums, so that one stays. Only where every rank that is in the sums does it again can the new ones take
// their place, if they replace (ChooseModes). `again`, by rank: its contribution meets an older one of its own.
void JobCore::DropWhatStays(PairKey key, Pair& pair, const std::vector<int>& ranks, std::vector<bool>* again) {
  again->assign(world_size(), false);
  for (int rank : ranks) {
    (*again)[rank] = pair.stays[rank] > 0;
  }
  bool all = true;
  for (int rank = 0; rank < world_size(); ++rank) {
    all = all && (pair.added[rank] == 0 || (*again)[rank]);
  }
  for (int rank : ranks) {
    if (!(*again)[rank]) {
      ++pair.added[rank];
      continue;
    }
    --pair.stays[rank];
    if (!all) {
      std::vector<bool>& present = pair.waiting[rank].front().present;
      present.assign(present.size(), false);
    }
  }
  if (all && std::find(again->begin(), again->end(), true) != again->end()) {
    BeginAnew(key, pair, ranks);
  }
}

// All do it again. Where everything that they give is fresh, the first try leaves no trace: nor in what the second
// leaves out, unless older gradients are in those sums, nor in the count of what is added.
void JobCore::BeginAnew(PairKey key, Pair& pair, const std::vector<int>& ranks) {
  const std::vector<int>& params = plan_->groups[key.second].params;
  std::vector<bool> given(params.size(), false);
  for (int rank : ranks) {
    const Contribution& contribution = pair.waiting[rank].front();
    for (size_t i = 0; i < params.size(); ++i) {
      if (contribution.present[i] && !contribution.fresh[i]) {
        return;
      }
      given[i] = given[i] || contribution.present[i];
    }
  }
  if (std::find(given.begin(), given.end(), true) == given.end()) {
    return;  // nothing says that gradients were dropped
  }
  for (size_t i = 0; i < params.size(); ++i) {
    if (!given[i] && pair.own[i] != 0) {
      presence_.Set(params[i], false);
    }
  }
  pair.stays.assign(pair.stays.size(), 0);
  pair.added.assign(pair.added.size(), 0);
  for (int rank : ranks) {
    pair.added[rank] = 1;
  }
}

// A rank that holds nothing of a gradient cannot tell whether it replaces: it does as those that hold some.
void JobCore::FollowHolders(PairKey key, Pair& pair, const std::vector<int>& ranks) {
  const std::vector<int>& params = plan_->groups[key.second].params;
  const auto says = [&pair](int rank, size_t i) {
    const Contribution& contribution = pair.waiting[rank].front();
    return contribution.present[i] ? (contribution.fresh[i] ? 1 : 2) : 0;
  };
  for (size_t i = 0; i < params.size(); ++i) {
    int said = 0;
    for (int rank : ranks) {
      said |= says(rank, i);
    }
    if (said != 3) {
      continue;
    }
    const std::vector<bool>& holders = presence_.Holders(params[i]);
    int of_holders = 0;
    for (int rank : ranks) {
      of_holders |= holders[rank] ? says(rank, i) : 0;
    }
    for (int rank : ranks) {
      if (!holders[rank] && of_holders != 0) {
        pair.waiting[rank].front().fresh[i] = of_holders == 1;
      }
    }
  }
}

absl::Status JobCore::ChooseModes(PairKey key, Pair& pair, const std::vector<int>& ranks,
                                  const std::vector<bool>& again, const OfOthers* others,
                                  std::vector<GradientMode>* modes) {
  const GroupPlan& plan = plan_->groups[key.second];
  modes->assign(plan.params.size(), GradientMode::kAccumulate);
  for (size_t i = 0; i < plan.params.size(); ++i) {
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
                       absl::StrCat("SubmitGradients group \"", group_name(key.second), "\""),
                       absl::StrCat("gradient of \"", plan_->params[param].fqn, "\" replaces on rank ", fresh_rank,
                                    " and adds on rank ", adding_rank, "; all ranks must do the same"));
    }
    if (adding_rank >= 0 && presence_.has(param)) {  // what a rank gave before stays, and it counts once
      adding_rank = -1;
      for (int rank : ranks) {
        Contribution& contribution = pair.waiting[rank].front();
        contribution.present[i] = contribution.present[i] && !again[rank];
        adding_rank = contribution.present[i] ? rank : adding_rank;
      }
    }
    if (others == nullptr ? fresh_rank < 0 && adding_rank < 0 : !others->present[i]) {
      continue;
    }
    const bool fresh = others == nullptr ? fresh_rank >= 0 : others->fresh[i];
    const bool replaces = fresh && pair.touched[i] == 0;
    if (replaces || !presence_.has(param)) {
      (*modes)[i] = GradientMode::kOverwrite;
      pair.own[i] = 1;
    }
    presence_.Set(param, true);
    pair.touched[i] = 1;
  }
  return absl::OkStatus();
}

absl::Status JobCore::IssueReduce(PairKey key, Pair& pair, const std::vector<int>& ranks, const OfOthers* others) {
  const int group = key.second;
  const GroupPlan& plan = plan_->groups[group];
  DeviceOps zeros = SettlePresence(plan.params, key.first);
  SHARDD_RETURN_IF_ERROR(std::exchange(uneven_gradient_, absl::OkStatus()));
  FollowHolders(key, pair, ranks);
  std::vector<bool> again;
  DropWhatStays(key, pair, ranks, &again);
  ReduceScatterRequest request;
  request.plan = plan_.get();
  request.group = group;
  request.gradients = memory_->pointers().gradients;
  request.gradients_file =
      memory_->gradients()->on_host() && world_size() <= kRanksOfOneFile ? memory_->gradients()->fd() : -1;
  request.staging = memory_->StagingByRank(*plan_);
  request.staging_bytes = plan_->staging_bytes;
  request.reduce_dtype = plan.mixed_precision.reduce_dtype();
  request.keep_low_precision = plan.mixed_precision.keep_low_precision_grads();
  request.scale = gradient_scale_;
  request.label = absl::StrCat("reduce ", group_name(group), " step ", committed_.step() + 1);
  SHARDD_RETURN_IF_ERROR(ChooseModes(key, pair, ranks, again, others, &request.modes));
  if (others != nullptr) {
    request.nodes = {nodes_->member().generation(), others->sequence, others->present};
    request.staging.clear();  // it is where the nodes' sums are made, and the collective's
    request.staging_bytes = 0;
  }
  Held reduction;
  reduction.order = Held::Order::kGradients;
  reduction.what = absl::StrCat("SubmitGradients group \"", group_name(group), "\"");
  reduction.signals = SignalsOfReduction(key, pair, ranks);
  std::vector<std::shared_ptr<SessionMemory>> keep;
  std::vector<bool> stream_ordered;
  for (int rank : ranks) {
    stream_ordered.push_back(pair.waiting[rank].front().done != 0);
    GradientSource source;
    source.rank = rank;
    source.slot = sessions_[rank]->slot(group);
    source.present = std::move(pair.waiting[rank].front().present);
    for (size_t i = 0; i < plan.params.size(); ++i) {
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
  for (size_t i = 0; i < ranks.size(); ++i) {
    IssueSlot(ranks[i], plan.gradient_slot, stream_ordered[i]);
  }
  reduction.run = [this, r = Reduction{group, ranks, std::move(stream_ordered), std::move(zeros), std::move(request),
                                       std::move(keep)}]() mutable {
    SubmitReduction(std::move(r));
    return absl::OkStatus();
  };
  return WhenGivenBack(std::move(reduction));
}

// What was enqueued before: the slots' bytes of those who give; of the others, who may have written into the gradient
// shards, what they gave back with the backward, or last. A later signal of a rank could wait for this very reduction.
std::vector<DoneSignal> JobCore::SignalsOfReduction(PairKey key, const Pair& pair,
                                                    const std::vector<int>& ranks) const {
  std::vector<DoneSignal> signals;
  for (int rank = 0; rank < world_size(); ++rank) {
    if (sessions_[rank] == nullptr) {
      continue;
    }
    const RankStep& state = ranks_[rank];
    uint64_t done = 0;
    if (std::find(ranks.begin(), ranks.end(), rank) != ranks.end()) {
      done = pair.waiting[rank].front().done;
    } else if (static_cast<size_t>(key.first) < state.done_at_close.size()) {
      done = state.done_at_close[static_cast<size_t>(key.first)];
    } else {
      done = state.stepped ? state.done_at_step : sessions_[rank]->ring().last_done();
    }
    if (done != 0) {
      signals.push_back(SignalOf(rank, done));
    }
  }
  return signals;
}

void JobCore::SubmitReduction(Reduction reduction) {
  if (collective_->may_hold_requests()) {
    reduction.request.zeros = std::exchange(reduction.zeros, {});
  }
  DeviceOps& zeros = reduction.zeros;
  // The zeros are part of the reduction: it has ended when they are there too.
  const int parts =
      1 + static_cast<int>(std::count_if(zeros.begin(), zeros.end(), [](const auto& ops) { return !ops.empty(); }));
  const auto done =
      JoinGradientWork(parts, [this, group = reduction.group, ranks = std::move(reduction.ranks),
                               stream_ordered = std::move(reduction.stream_ordered), keep = std::move(reduction.keep),
                               epoch = committed_.epoch()](absl::Status status) mutable {
        if (epoch != committed_.epoch() || closed_) {
          memory_worker_->Post([gone = std::move(keep)] {});
          return;
        }
        --pending_reductions_;
        if (!status.ok()) {
          Abort(std::move(status), {});
          return;
        }
        OnReduced(group, ranks, stream_ordered);
      });
  for (size_t device = 0; device < zeros.size(); ++device) {
    if (!zeros[device].empty()) {
      DeviceWork work;
      work.label = absl::StrCat("zero absent ", group_name(reduction.group), " step ", committed_.step() + 1);
      work.ops = std::move(zeros[device]);
      work.done = done;
      devices_[device]->Submit(StreamId::kPostBackward, std::move(work));
    }
  }
  collective_->ReduceScatter(std::move(reduction.request), done);
  if (sums_.by_trainers()) {
    PollSoon();
  }
}

// Ranks that run groups in different orders can come to hold each other up: each sleeps until a slot is released whose
// group another rank submits only later. Such a state is reached whatever the timing.
bool JobCore::AllStuck() const {
  bool stuck = false;
  for (int rank = 0; rank < world_size(); ++rank) {
    const RankStep& state = ranks_[rank];
    if (state.blocked_slot >= 0) {
      const std::optional<PairKey>& key = state.slot_holder[state.blocked_slot];
      stuck = stuck || (key.has_value() && !pairs_.at(*key).waiting[rank].empty());
    } else if (!state.stepped && !(passes_.entering(rank) && passes_.stepped(rank))) {
      return false;
    }
  }
  return stuck && !AwaitsNodes();
}

absl::Status JobCore::AddBeforeTurn() {
  if (nodes_ != nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("SubmitGradients: the ranks of this node run groups in orders in which each waits for another's "
                     "gradient slot; submit groups in the same order on all ranks (step=",
                     committed_.step() + 1, ")"));
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
    for (int other = 0; older_open(key->first) && other < world_size(); ++other) {
      for (int param : plan_->groups[key->second].params) {
        if (presence_.IsSaid(other, param, key->first)) {
          return RankError(absl::StatusCode::kFailedPrecondition, other,
                           absl::StrCat("SetGradientPresence \"", plan_->params[param].fqn, "\""),
                           "a gradient on top of it cannot be added before its turn, and all ranks wait for each "
                           "other; submit groups in the same order on all ranks");
        }
      }
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
