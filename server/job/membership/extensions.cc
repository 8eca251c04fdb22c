#include "server/job/membership/extensions.h"

#include <algorithm>

namespace shardd {

Extensions::ByRank::const_iterator Extensions::FindDifferent() const {
  return std::find_if(by_rank_.begin(), by_rank_.end(), [this](const auto& entry) {
    return entry.second.extension->plan.digest != by_rank_.begin()->second.extension->plan.digest;
  });
}

void Extensions::StartBuild() {
  building_ = true;
  std::vector<Done> waiting;
  for (auto& [rank, asked] : by_rank_) {
    waiting.push_back(std::exchange(asked.done, nullptr));
  }
  Asked& agreed = by_rank_.begin()->second;
  const Build build = std::exchange(agreed.build, nullptr);
  build(agreed.extension, std::move(waiting));
}

Extensions::Done Extensions::Take(int rank) { return std::move(by_rank_.extract(rank).mapped().done); }

Extensions::ByRank Extensions::TakeAll() {
  building_ = false;
  return std::exchange(by_rank_, {});
}

void Extensions::Answer(const ByRank& asked, const absl::Status& status) {
  for (const auto& [rank, of_rank] : asked) {
    if (of_rank.done != nullptr) {
      of_rank.done(status);
    }
  }
}

}  // namespace shardd
