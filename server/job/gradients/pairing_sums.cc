// What is added together, and what it replaces.

#include <algorithm>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/gradients/pairing.h"
#include "server/job/step/committed.h"
#include "server/multinode/given_gradients.h"

namespace shardd {

std::optional<std::vector<int>> Pairing::Complete(PairKey key) const {
  const Pair& pair = pairs_.at(key);
  std::vector<int> ranks;
  bool any = false;
  for (int rank = 0; rank < world_size(); ++rank) {
    if (pair.folded[rank] > 0) {
      any = true;
    } else if (!pair.waiting[rank].empty()) {
      any = true;
      ranks.push_back(rank);
    } else if (closed(rank) <= key.first) {
      return std::nullopt;  // its contribution may still come
    }
  }
  return any ? std::optional(std::move(ranks)) : std::nullopt;
}

void Pairing::NextOccurrence(PairKey key) {
  Pair& pair = pairs_.at(key);
  for (int& folded : pair.folded) {
    folded = std::max(0, folded - 1);
  }
  EndOccurrence(pair);
}

// Also what keeps a step of many backwards small.
void Pairing::ForgetIfClosed(PairKey key) {
  const Pair& pair = pairs_.at(key);
  for (int rank = 0; rank < world_size(); ++rank) {
    if (closed(rank) <= key.first || !pair.waiting[rank].empty()) {
      return;
    }
  }
  pairs_.erase(key);
}

GradientPresence::Uneven Pairing::Settle(PairKey key) {
  return NoteUneven(presence_.Settle(plan_->groups[static_cast<size_t>(key.second)].params, key.first));
}

GradientPresence::Uneven Pairing::SettleAll() { return NoteUneven(presence_.SettleAll()); }

// On several nodes the others do not know of what ranks of this one have dropped alone. Says so of the last parameter.
GradientPresence::Uneven Pairing::NoteUneven(GradientPresence::Uneven uneven) {
  if (plan_->nodes() <= 1 || uneven.empty()) {
    return uneven;
  }
  const auto by_param = [](const auto& a, const auto& b) { return a.first < b.first; };
  const auto& [param, has] = *std::max_element(uneven.begin(), uneven.end(), by_param);
  const std::vector<bool>& holders = presence_.Holders(param);
  const auto holding = std::count(holders.begin(), holders.end(), true);
  const auto having = std::count(has.begin(), has.end(), true);
  uneven_ = absl::FailedPreconditionError(
      absl::StrCat("SetGradientPresence \"", plan_->params[static_cast<size_t>(param)].fqn, "\": ", holding - having,
                   " of ", holding,
                   " ranks of this node that hold some of it have dropped it, and other nodes do not know; on several "
                   "nodes all ranks must drop the same (step=",
                   committed_->step() + 1, ")"));
  return uneven;
}

absl::Status Pairing::TakeUneven() { return std::exchange(uneven_, absl::OkStatus()); }

absl::StatusOr<Pairing::Sum> Pairing::Take(PairKey key, const std::vector<int>& ranks, const GivenGradients* others) {
  Pair& pair = pairs_.at(key);
  Sum sum;
  {  // before anything of what ranks said is changed: a rank shows what it gave, whatever becomes of that
    absl::InlinedVector<GivenByOthers::Part, 16> parts;
    for (int rank : ranks) {
      parts.push_back({rank, &pair.waiting[rank].front().present});
    }
    sum.lacking = given_by_others_.Note(key.first, key.second, parts, others == nullptr ? nullptr : &others->present);
  }
  FollowHolders(key, pair, ranks);
  const std::vector<bool> again = DropWhatStays(key, pair, ranks);
  for (int rank : ranks) {
    std::vector<bool>& fresh = pair.waiting[rank].front().fresh;
    for (size_t i = 0; i < fresh.size(); ++i) {
      // What other ranks have given in an earlier occurrence is of this backward, too, and stays.
      fresh[i] = fresh[i] && pair.given[i] == 0;
    }
  }
  SHARDD_RETURN_IF_ERROR(ChooseModes(key, pair, ranks, again, others, &sum.modes));
  for (int rank : ranks) {
    sum.given.push_back(std::move(pair.waiting[rank].front()));
    pair.waiting[rank].pop_front();
  }
  return sum;
}

// A rank that has not asked about backwards in which others gave a gradient cannot tell that there is one, as where its
// program looks at gradients after the last backward only: what it gives is added. Nor can one that holds nothing of a
// gradient tell whether it replaces: it does as those that hold some.
void Pairing::FollowHolders(PairKey key, Pair& pair, const std::vector<int>& ranks) {
  const std::vector<int>& params = plan_->groups[static_cast<size_t>(key.second)].params;
  for (size_t i = 0; given_by_others_.OfGroup(key.second) && i < params.size(); ++i) {
    for (int rank : ranks) {
      Contribution& contribution = pair.waiting[rank].front();
      contribution.fresh[i] =
          contribution.fresh[i] && !(contribution.asks && given_by_others_.IsUnaware(rank, params[i], key.first));
    }
  }
  const auto says = [&pair](int rank, size_t i) {
    const Contribution& contribution = pair.waiting[rank].front();
    return contribution.present[i] ? (contribution.fresh[i] ? 1 : 2) : 0;
  };
  for (size_t i = 0; i < params.size(); ++i) {
    int said = 0;
    for (int rank : ranks) {
      said |= says(rank, i);
    }
    // Where it gives the step's first of it, and nobody who holds some gives any, it replaces what is there from before
    // the step, as theirs would (kAsksForOthers).
    const bool may_be_first = said == 2 && presence_.has(params[i]) && !presence_.IsOfStep(params[i]);
    if (said != 3 && !may_be_first) {
      continue;
    }
    const std::vector<bool>& holders = presence_.Holders(params[i]);
    int of_holders = 0;
    for (int rank : ranks) {
      of_holders |= holders[rank] ? says(rank, i) : 0;
    }
    for (int rank : ranks) {
      Contribution& contribution = pair.waiting[rank].front();
      if (!holders[rank] && of_holders != 0) {
        contribution.fresh[i] = of_holders == 1;
      } else if (!holders[rank] && may_be_first && contribution.asks) {
        contribution.fresh[i] = true;
      }
    }
  }
}

// A rank that gave a backward up and does it again counts once per group in it: its first contribution cannot be taken
// out of the sums, so that one stays. Only where every rank that is in the sums does it again can the new ones take
// their place, if they replace (ChooseModes). Returns, by rank: its contribution meets an older one of its own.
std::vector<bool> Pairing::DropWhatStays(PairKey key, Pair& pair, const std::vector<int>& ranks) {
  std::vector<bool> again(static_cast<size_t>(world_size()), false);
  for (int rank : ranks) {
    again[rank] = pair.stays[rank] > 0;
  }
  bool all = true;
  for (int rank = 0; rank < world_size(); ++rank) {
    all = all && (pair.added[rank] == 0 || again[rank]);
  }
  for (int rank : ranks) {
    if (!again[rank]) {
      ++pair.added[rank];
      continue;
    }
    --pair.stays[rank];
    if (!all) {
      std::vector<bool>& present = pair.waiting[rank].front().present;
      present.assign(present.size(), false);
    }
  }
  if (all && std::find(again.begin(), again.end(), true) != again.end()) {
    pair.given.assign(pair.given.size(), 0);
    BeginAnew(key, pair, ranks);
  }
  return again;
}

// All do it again. Where everything that they give is fresh, the first try leaves no trace: nor in what the second
// leaves out, unless older gradients are in those sums, nor in the count of what is added.
void Pairing::BeginAnew(PairKey key, Pair& pair, const std::vector<int>& ranks) {
  const std::vector<int>& params = plan_->groups[static_cast<size_t>(key.second)].params;
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
      given_by_others_.Forget(params[i]);
    }
  }
  pair.stays.assign(pair.stays.size(), 0);
  pair.added.assign(pair.added.size(), 0);
  for (int rank : ranks) {
    pair.added[rank] = 1;
  }
}

void Pairing::EndOccurrence(Pair& pair) {
  for (size_t i = 0; i < pair.touched.size(); ++i) {
    pair.given[i] |= pair.touched[i];
    pair.touched[i] = 0;
  }
}

absl::Status Pairing::ChooseModes(PairKey key, Pair& pair, const std::vector<int>& ranks,
                                  const std::vector<bool>& again, const GivenGradients* others,
                                  std::vector<GradientMode>* modes) {
  const GroupPlan& plan = plan_->groups[static_cast<size_t>(key.second)];
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
      return Error(absl::StatusCode::kFailedPrecondition, fresh_rank,
                   absl::StrCat("SubmitGradients group \"", group_name(key.second), "\""),
                   absl::StrCat("gradient of \"", plan_->params[static_cast<size_t>(param)].fqn, "\" replaces on rank ",
                                fresh_rank, " and adds on rank ", adding_rank, "; all ranks must do the same"));
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

// Before its turn -----------------------------------------------------------------------------------------------------

absl::StatusOr<std::optional<Pairing::Early>> Pairing::BeforeTurn(int rank) const {
  if (!SleepsForTurn(rank)) {
    return std::nullopt;  // it is awake, or was added for another rank that sleeps
  }
  Early early;
  early.key = *of(rank).slots[static_cast<size_t>(of(rank).sleeps_for)];
  const auto [backward, group] = early.key;
  const Pair& pair = pairs_.at(early.key);
  const bool older_open = SomeAreBehind(backward);
  for (int other = 0; older_open && other < world_size(); ++other) {
    for (int param : plan_->groups[static_cast<size_t>(group)].params) {
      if (presence_.IsSaid(other, param, backward)) {
        return Error(absl::StatusCode::kFailedPrecondition, other,
                     absl::StrCat("SetGradientPresence \"", plan_->params[static_cast<size_t>(param)].fqn, "\""),
                     "a gradient on top of it cannot be added before its turn, and all ranks wait for each other; "
                     "submit groups in the same order on all ranks");
      }
    }
  }
  const int turn = pair.folded[rank];
  for (int other = 0; other < world_size(); ++other) {
    if (pair.folded[other] != turn || pair.waiting[other].empty()) {
      continue;
    }
    const std::vector<bool>& fresh = pair.waiting[other].front().fresh;
    if ((turn > 0 || older_open) && std::find(fresh.begin(), fresh.end(), true) != fresh.end()) {
      return Error(absl::StatusCode::kFailedPrecondition, other,
                   absl::StrCat("SubmitGradients group \"", group_name(group), "\""),
                   "a gradient that replaces cannot be added before its turn, and all ranks wait for each other; "
                   "submit groups in the same order on all ranks");
    }
    early.ranks.push_back(other);
  }
  return early;
}

void Pairing::AddedBeforeTurn(const Early& early) {
  Pair& pair = pairs_.at(early.key);
  for (int rank : early.ranks) {
    ++pair.folded[rank];
  }
}

}  // namespace shardd
