#include "server/job/gradients/given_by_others.h"

#include <algorithm>
#include <utility>

namespace shardd {

GivenByOthers::GivenByOthers(std::shared_ptr<const ShardPlan> plan)
    : plan_(std::move(plan)),
      lacked_(plan_->params.size()),
      of_group_(plan_->groups.size(), false),
      asked_(static_cast<size_t>(plan_->world_size), 0),
      last_(static_cast<size_t>(plan_->world_size), kNever) {}

void GivenByOthers::Lacked(int rank, int param, int backward) {
  std::vector<Lacks>& by_rank = lacked_[static_cast<size_t>(param)];
  of_group_[static_cast<size_t>(plan_->params[static_cast<size_t>(param)].group)] = true;
  by_rank.resize(asked_.size());
  Lacks& lacks = by_rank[static_cast<size_t>(rank)];
  lacks.first = lacks.first >= asked_[static_cast<size_t>(rank)] ? lacks.first : backward;
  lacks.last = backward;
  last_[static_cast<size_t>(rank)] = std::max(last_[static_cast<size_t>(rank)], backward);
}

std::vector<int> GivenByOthers::Note(int backward, int group, absl::Span<const Part> parts,
                                     const std::vector<bool>* by_all) {
  const size_t world_size = asked_.size();
  const std::vector<bool>* const same = by_all == nullptr && !parts.empty() ? parts.front().present : by_all;
  if (parts.size() == world_size &&
      std::all_of(parts.begin(), parts.end(), [same](const Part& part) { return *part.present == *same; })) {
    return {};  // as it nearly always is
  }
  std::vector<const std::vector<bool>*> of_rank(world_size, nullptr);
  for (const Part& part : parts) {
    of_rank[static_cast<size_t>(part.rank)] = part.present;
  }
  const std::vector<int>& params = plan_->groups[static_cast<size_t>(group)].params;
  std::vector<bool> lacks(world_size, false);
  for (size_t i = 0; i < params.size(); ++i) {
    const auto gives = [i](const std::vector<bool>* present) { return present != nullptr && (*present)[i]; };
    if (by_all != nullptr ? !gives(by_all) : std::none_of(of_rank.begin(), of_rank.end(), gives)) {
      continue;
    }
    for (size_t rank = 0; rank < world_size; ++rank) {
      if (!gives(of_rank[rank])) {
        lacks[rank] = true;
        Lacked(static_cast<int>(rank), params[i], backward);
      }
    }
  }
  std::vector<int> lacking;
  for (size_t rank = 0; rank < world_size; ++rank) {
    if (lacks[rank]) {
      lacking.push_back(static_cast<int>(rank));
    }
  }
  return lacking;
}

void GivenByOthers::NoteTakenBack(int rank, int backward, int group, const std::vector<bool>& added) {
  const std::vector<int>& params = plan_->groups[static_cast<size_t>(group)].params;
  for (size_t i = 0; i < params.size(); ++i) {
    if (added[i]) {
      Lacked(rank, params[i], backward);
    }
  }
}

std::vector<int> GivenByOthers::Ask(int rank, int first, int closed) {
  asked_[static_cast<size_t>(rank)] = closed;
  std::vector<int> params;
  if (last_[static_cast<size_t>(rank)] < std::max(first, 0)) return params;  // as where somebody asks again and again
  for (size_t param = 0; param < lacked_.size(); ++param) {
    const std::vector<Lacks>& by_rank = lacked_[param];
    if (!by_rank.empty() && by_rank[static_cast<size_t>(rank)].last >= std::max(first, 0)) {
      params.push_back(static_cast<int>(param));
    }
  }
  return params;
}

bool GivenByOthers::IsUnaware(int rank, int param, int backward) const {
  const std::vector<Lacks>& by_rank = lacked_[static_cast<size_t>(param)];
  const int first = by_rank.empty() ? kNever : by_rank[static_cast<size_t>(rank)].first;
  return first >= asked_[static_cast<size_t>(rank)] && first < backward;
}

void GivenByOthers::Clear() {
  for (size_t group = 0; group < of_group_.size(); ++group) {
    for (size_t i = 0; of_group_[group] && i < plan_->groups[group].params.size(); ++i) {
      Forget(plan_->groups[group].params[i]);
    }
  }
  of_group_.assign(of_group_.size(), false);
  asked_.assign(asked_.size(), 0);
  last_.assign(last_.size(), kNever);
}

}  // namespace shardd
