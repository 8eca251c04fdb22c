#include "server/job/gradients/gradient_presence.h"

#include <algorithm>
#include <limits>
#include <set>

namespace shardd {

GradientPresence::GradientPresence(std::shared_ptr<const ShardPlan> plan)
    : plan_(std::move(plan)),
      present_(plan_->params.size(), false),
      of_step_(present_),
      said_(static_cast<size_t>(plan_->world_size)) {}

void GradientPresence::Clear() { present_.assign(present_.size(), false); }

void GradientPresence::Reset() {
  Clear();
  BeginStep();
  said_.assign(said_.size(), {});
  some_said_ = false;
}

void GradientPresence::Say(int rank, int param, const SaidPresence& word) {
  said_[static_cast<size_t>(rank)][param] = word;
  some_said_ = true;
}

bool GradientPresence::IsSaid(int rank, int param, int backward) const {
  const auto& of_rank = said_[static_cast<size_t>(rank)];
  const auto it = of_rank.find(param);
  return it != of_rank.end() && it->second.closed_backwards <= backward;
}

const std::vector<bool>& GradientPresence::Holders(int param) {
  std::vector<bool>& holders = holders_[param];
  if (holders.empty()) {
    for (int rank = 0; rank < plan_->world_size; ++rank) {
      holders.push_back(OwnedRange(*plan_, Purpose::kGradients, param, rank).numel > 0);
    }
    if (std::find(holders.begin(), holders.end(), true) == holders.end()) {
      holders.assign(holders.size(), true);
    }
  }
  return holders;
}

GradientPresence::Uneven GradientPresence::Settle(const std::vector<int>& params, int backward) {
  Uneven uneven;
  if (!some_said_) {
    return uneven;
  }
  for (const int param : params) {
    std::vector<bool> has;
    if (SettleParam(param, backward, &has)) {
      uneven.emplace(param, std::move(has));
    }
  }
  some_said_ = std::any_of(said_.begin(), said_.end(), [](const auto& of_rank) { return !of_rank.empty(); });
  return uneven;
}

GradientPresence::Uneven GradientPresence::SettleAll() {
  std::set<int> params;
  for (const auto& of_rank : said_) {
    for (const auto& [param, word] : of_rank) {
      params.insert(param);
    }
  }
  return Settle({params.begin(), params.end()}, std::numeric_limits<int>::max());
}

// True: some of its holders have it and some do not.
bool GradientPresence::SettleParam(int param, int backward, std::vector<bool>* has) {
  std::vector<std::pair<size_t, SaidPresence>> words;  // by rank
  for (size_t rank = 0; rank < said_.size(); ++rank) {
    const auto it = said_[rank].find(param);
    if (it != said_[rank].end() && it->second.closed_backwards <= backward) {
      words.emplace_back(rank, it->second);
      said_[rank].erase(it);
    }
  }
  if (words.empty()) {
    return false;
  }
  const std::vector<bool>& holders = Holders(param);
  const auto holding = std::count(holders.begin(), holders.end(), true);
  const auto of_first_tries = std::count_if(
      words.begin(), words.end(), [&](const auto& entry) { return entry.second.of_first_try && holders[entry.first]; });
  has->assign(said_.size(), false);
  for (size_t rank = 0; rank < said_.size(); ++rank) {
    (*has)[rank] = holders[rank] && this->has(param);
  }
  for (const auto& [rank, word] : words) {
    if (holders[rank] && (!word.of_first_try || of_first_tries == holding)) {
      (*has)[rank] = word.present;
    }
  }
  const auto having = std::count(has->begin(), has->end(), true);
  Set(param, having > 0);
  return having > 0 && having < holding;
}

}  // namespace shardd
