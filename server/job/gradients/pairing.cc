#include "server/job/gradients/pairing.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/step/committed.h"
#include "server/job/step/rank_error.h"
#include "server/multinode/backwards.h"

namespace shardd {
namespace {

constexpr int kMaxBackwards = 1 << 14;  // of a step: what is paired is kept until the commit

bool AnyPositive(const std::vector<int>& counts) {
  return std::any_of(counts.begin(), counts.end(), [](int count) { return count > 0; });
}

}  // namespace

Pairing::Pairing(std::shared_ptr<const ShardPlan> plan, const Committed* committed)
    : plan_(std::move(plan)), committed_(committed), presence_(plan_), given_by_others_(plan_) {
  EndEpoch();
}

absl::Status Pairing::Error(absl::StatusCode code, int rank, absl::string_view what, absl::string_view fact) const {
  return RankErrorAt(committed_->step(), code, rank, what, fact);
}

Pairing::Pair& Pairing::GetPair(PairKey key) {
  Pair& pair = pairs_[key];
  if (pair.submitted.empty()) {
    pair.waiting.resize(static_cast<size_t>(world_size()));
    pair.submitted.assign(static_cast<size_t>(world_size()), 0);
    pair.added = pair.stays = pair.folded = pair.submitted;
    pair.touched.assign(plan_->groups[static_cast<size_t>(key.second)].params.size(), 0);
    pair.given = pair.own = pair.touched;
  }
  return pair;
}

// Backwards -----------------------------------------------------------------------------------------------------------

int Pairing::closed_by_all() const {
  int closed = kAllBackwards;
  for (const Rank& rank : ranks_) {
    closed = std::min(closed, rank.closed);
  }
  return closed;
}

bool Pairing::SomeAreBehind(int backward) const {
  return std::any_of(ranks_.begin(), ranks_.end(), [backward](const Rank& rank) { return rank.closed < backward; });
}

std::optional<uint64_t> Pairing::DoneAtClose(int rank, int backward) const {
  const std::vector<uint64_t>& done = of(rank).done_at_close;
  return static_cast<size_t>(backward) < done.size() ? std::optional(done[static_cast<size_t>(backward)])
                                                     : std::nullopt;
}

// Giving --------------------------------------------------------------------------------------------------------------

absl::StatusOr<Contribution> Pairing::Check(int rank, RankCommand command, absl::string_view what) const {
  const GroupPlan& group = plan_->groups[static_cast<size_t>(command.group)];
  if (const auto& holder = of(rank).slots[static_cast<size_t>(group.gradient_slot)]; holder.has_value()) {
    return Error(absl::StatusCode::kFailedPrecondition, rank, what,
                 absl::StrCat("gradient slot ", group.gradient_slot, " still holds group \"",
                              group_name(holder->second), "\"; wait for the slot first"));
  }
  const size_t bits = group.params.size();
  Contribution contribution;
  contribution.done = command.done;
  contribution.asks = (command.flags & kAsksForOthers) != 0;
  contribution.fresh = command.fresh.empty() ? std::vector<bool>(bits, false) : std::move(command.fresh);
  contribution.present.resize(bits);
  for (size_t i = 0; i < bits; ++i) {
    const ParamPlan& param = plan_->params[static_cast<size_t>(group.params[i])];
    if (!param.requires_grad && !command.present.empty() && command.present[i]) {
      return Error(absl::StatusCode::kInvalidArgument, rank, what,
                   absl::StrCat("parameter \"", param.fqn, "\" is frozen but marked as present"));
    }
    contribution.present[i] = param.requires_grad && (command.present.empty() || command.present[i]);
  }
  return contribution;
}

PairKey Pairing::Give(int rank, int group, Contribution contribution) {
  const PairKey key(closed(rank), group);
  any_seen_ = true;
  Pair& pair = GetPair(key);
  pair.waiting[rank].push_back(std::move(contribution));
  ++pair.submitted[rank];
  of(rank).abandoned.erase(key.first);
  of(rank).slots[static_cast<size_t>(plan_->groups[static_cast<size_t>(group)].gradient_slot)] = key;
  return key;
}

absl::Status Pairing::CheckMissing(PairKey key) const {
  for (int rank = 0; rank < world_size(); ++rank) {
    SHARDD_RETURN_IF_ERROR(CheckMissing(rank, key));
  }
  return absl::OkStatus();
}

absl::Status Pairing::CheckMissing(int rank, PairKey key) const {
  const Pair& pair = pairs_.at(key);
  if (plan_->config.allow_missing_contribution() || closed(rank) <= key.first || pair.submitted[rank] > 0 ||
      of(rank).abandoned.count(key.first) > 0) {
    return absl::OkStatus();
  }
  for (int other = 0; other < world_size(); ++other) {
    if (pair.submitted[other] > 0) {
      return Error(absl::StatusCode::kFailedPrecondition, rank, "backward",
                   absl::StrCat("rank ", rank, " closed backward ", key.first, " without SubmitGradients for group \"",
                                group_name(key.second), "\", which rank ", other,
                                " submitted; submit it (with an empty presence mask if there is no gradient), or set "
                                "allow_missing_contribution"));
    }
  }
  return absl::OkStatus();
}

absl::Status Pairing::CheckMayClose(int rank) const {
  if (closed(rank) >= kMaxBackwards) {
    return Error(absl::StatusCode::kResourceExhausted, rank, "BackwardDone",
                 absl::StrCat("too many backwards in one step (got ", closed(rank) + 1, ", want at most ",
                              kMaxBackwards, "); step more often"));
  }
  return absl::OkStatus();
}

std::vector<PairKey> Pairing::Close(int rank, uint64_t done) {
  const int backward = of(rank).closed++;
  of(rank).done_at_close.push_back(done);
  std::vector<PairKey> keys;
  for (auto it = pairs_.lower_bound({backward, 0}); it != pairs_.end() && it->first.first == backward; ++it) {
    keys.push_back(it->first);
  }
  return keys;
}

std::vector<PairKey> Pairing::CloseAll(int rank) {
  of(rank).closed = kAllBackwards;
  std::vector<PairKey> keys;
  for (const auto& [key, pair] : pairs_) {
    keys.push_back(key);
  }
  return keys;
}

absl::Status Pairing::CheckClosed(int rank, absl::string_view what) const {
  if (GivenInOpenBackward(rank) >= 0 && of(rank).abandoned.count(closed(rank)) == 0) {
    return Error(absl::StatusCode::kFailedPrecondition, rank, what,
                 absl::StrCat("backward ", closed(rank), " is still open; call BackwardDone first"));
  }
  return absl::OkStatus();
}

bool Pairing::SomeGaveFrom(int backward) const {
  return std::any_of(pairs_.lower_bound({backward, 0}), pairs_.end(),
                     [](const auto& entry) { return AnyPositive(entry.second.submitted); });
}

bool Pairing::GaveFrom(int rank, int backward) const {
  return std::any_of(pairs_.lower_bound({backward, 0}), pairs_.end(),
                     [rank](const auto& entry) { return entry.second.submitted[rank] > 0; });
}

int Pairing::GivenInOpenBackward(int rank) const {
  const int open = closed(rank);
  for (auto it = pairs_.lower_bound({open, 0}); it != pairs_.end() && it->first.first == open; ++it) {
    if (it->second.submitted[rank] > 0) {
      return it->first.second;
    }
  }
  return -1;
}

Pairing::Abandoned Pairing::Abandon(int rank) {
  const int backward = closed(rank);
  Abandoned abandoned;
  for (auto it = pairs_.lower_bound({backward, 0}); it != pairs_.end() && it->first.first == backward; ++it) {
    Pair& pair = it->second;
    if (!pair.waiting[rank].empty()) {
      abandoned.taken_back += static_cast<int>(pair.waiting[rank].size());
      pair.waiting[rank].clear();
      abandoned.freed_slots.push_back(plan_->groups[static_cast<size_t>(it->first.second)].gradient_slot);
    }
    pair.submitted[rank] = pair.stays[rank] = pair.added[rank];
    abandoned.stays += pair.added[rank];
    if (pair.added[rank] > 0) {
      std::vector<bool> added(pair.given.size());
      for (size_t i = 0; i < added.size(); ++i) {
        added[i] = pair.given[i] != 0 || pair.touched[i] != 0;
      }
      given_by_others_.NoteTakenBack(rank, backward, it->first.second, added);
    }
  }
  of(rank).abandoned.insert(backward);
  return abandoned;
}

absl::Status Pairing::SetPresence(int rank, int64_t param, bool present, bool committing) {
  if (param < 0 || param >= static_cast<int64_t>(plan_->params.size())) {
    return Error(absl::StatusCode::kInvalidArgument, rank, "SetGradientPresence",
                 absl::StrCat("no such parameter (got ", param, ", want 0 to ", plan_->params.size() - 1, ")"));
  }
  const int index = static_cast<int>(param);
  const ParamPlan& plan = plan_->params[static_cast<size_t>(param)];
  const std::string what = absl::StrCat("SetGradientPresence \"", plan.fqn, "\"");
  if (!plan.requires_grad) {
    return Error(absl::StatusCode::kFailedPrecondition, rank, what, "the parameter is frozen");
  }
  const int place = closed(rank);
  if (place == kAllBackwards || committing) {
    return Error(absl::StatusCode::kFailedPrecondition, rank, what, "the step is being committed");
  }
  SHARDD_RETURN_IF_ERROR(CheckClosed(rank, what));
  for (auto it = pairs_.lower_bound({place, 0}); it != pairs_.end(); ++it) {
    if (it->first.second == plan.group && AnyPositive(it->second.folded)) {
      return Error(absl::StatusCode::kFailedPrecondition, rank, what,
                   absl::StrCat("gradients of backward ", it->first.first,
                                " were added to it before their turn, because ranks run groups in different orders"));
    }
  }
  const auto pair = pairs_.find({place, plan.group});  // of a first try, which the rank has given up
  if (present && pair != pairs_.end()) {
    pair->second.own[plan.index_in_group] = 0;  // it holds what the trainer has written, too
  }
  if (present == presence_.has(index) && !SomeAreBehind(place)) {
    presence_.Unsay(rank, index);  // as it is anyway: nothing that comes before its place is missing
    return absl::OkStatus();
  }
  // After Abandon the sum may hold the first try of the backward that comes behind this word, the other ranks'
  // gradients with it. It cannot be taken apart, so it goes only where all ranks drop theirs.
  const bool of_first_try = !present && pair != pairs_.end() && pair->second.added[rank] > 0;
  presence_.Say(rank, index, {place, present, of_first_try});
  return absl::OkStatus();
}

// Several nodes -------------------------------------------------------------------------------------------------------

std::optional<Pairing::Said> Pairing::Say(PairKey key, const std::vector<int>& ranks) {
  Pair& pair = pairs_.at(key);
  if (pair.said) {
    return std::nullopt;
  }
  FollowHolders(key, pair, ranks);
  const bool begins_anew = std::any_of(pair.stays.begin(), pair.stays.end(), [](int stays) { return stays > 0; });
  const size_t params = plan_->groups[static_cast<size_t>(key.second)].params.size();
  Said said;
  said.occurrence = pair.occurrence;
  said.present.resize(params);
  said.fresh.resize(params);
  for (size_t i = 0; i < params; ++i) {
    for (int rank : ranks) {
      const Contribution& contribution = pair.waiting[rank].front();
      said.present[i] = said.present[i] || contribution.present[i];
      said.fresh[i] = said.fresh[i] || (contribution.present[i] && contribution.fresh[i]);
    }
    said.fresh[i] = said.fresh[i] && (pair.given[i] == 0 || begins_anew);
  }
  pair.said = true;
  return said;
}

bool Pairing::AwaitsNodes() const {
  return std::any_of(pairs_.begin(), pairs_.end(), [](const auto& entry) { return entry.second.said; });
}

std::vector<int> Pairing::ToldToAdd(PairKey key, int occurrence) {
  const Pair& pair = GetPair(key);
  std::vector<int> ranks;
  for (int rank = 0; pair.said && occurrence == pair.occurrence && rank < world_size(); ++rank) {
    if (!pair.waiting[rank].empty()) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

void Pairing::AddedOverNodes(PairKey key, int occurrence) {
  Pair& pair = pairs_.at(key);
  if (pair.said && occurrence == pair.occurrence) {
    pair.said = false;
    ++pair.occurrence;
  }
  EndOccurrence(pair);
}

int Pairing::ClosedToSay() const {
  const int closed = closed_by_all();
  for (const auto& [key, pair] : pairs_) {
    const size_t said = pair.said ? 1 : 0;
    for (int rank = 0; key.first < closed && rank < world_size(); ++rank) {
      if (pair.waiting[rank].size() > said) {
        return 0;  // said behind the one that is under way
      }
    }
  }
  return closed;
}

// Gradient slots ------------------------------------------------------------------------------------------------------

void Pairing::FreeSlot(int rank, int slot) {
  of(rank).slots[static_cast<size_t>(slot)].reset();
  if (of(rank).sleeps_for == slot) {
    of(rank).sleeps_for = -1;
  }
}

bool Pairing::SleepsForTurn(int rank) const {
  if (!sleeps(rank)) {
    return false;
  }
  const std::optional<PairKey>& key = of(rank).slots[static_cast<size_t>(of(rank).sleeps_for)];
  const auto pair = key.has_value() ? pairs_.find(*key) : pairs_.end();  // gone: its sum is under way
  return pair != pairs_.end() && !pair->second.waiting[rank].empty();
}

Wait Pairing::WaitingFor(int rank) const {
  if (!sleeps(rank) && closed(rank) == 0) {
    return {};
  }
  for (const auto& [key, pair] : pairs_) {
    if ((pair.folded[rank] == 0 && pair.waiting[rank].empty()) || (!sleeps(rank) && key.first >= closed(rank))) {
      continue;
    }
    for (int other = 0; other < world_size(); ++other) {
      const bool missing = pair.folded[other] == 0 && pair.waiting[other].empty() && closed(other) <= key.first;
      if (other != rank && missing && pair.added[other] > pair.stays[other]) {  // it gave its part
        return {other, absl::StrCat("BackwardDone of backward ", key.first)};
      }
      if (other != rank && missing) {
        return {other, absl::StrCat("SubmitGradients \"", group_name(key.second), "\" of backward ", key.first)};
      }
    }
  }
  return {};
}

// Ends ----------------------------------------------------------------------------------------------------------------

void Pairing::EndStep() {
  pairs_.clear();
  presence_.BeginStep();
  given_by_others_.Clear();
  any_seen_ = false;
  for (Rank& rank : ranks_) {
    rank.closed = 0;
    rank.done_at_close.clear();
    rank.abandoned.clear();
  }
}

void Pairing::EndEpoch() {
  pairs_.clear();
  any_seen_ = false;
  ranks_.assign(static_cast<size_t>(world_size()), Rank());
  for (Rank& rank : ranks_) {
    rank.slots.resize(plan_->gradient_slots.size());
  }
  presence_.Reset();
  given_by_others_.Clear();
  uneven_ = absl::OkStatus();
}

void Pairing::Forget(int rank) {
  of(rank) = Rank();
  of(rank).slots.resize(plan_->gradient_slots.size());
  presence_.Forget(rank);
}

}  // namespace shardd
