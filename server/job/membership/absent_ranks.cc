#include "server/job/membership/absent_ranks.h"

#include <poll.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace shardd {

bool IsFinalRefusal(const absl::Status& status) {
  return absl::IsFailedPrecondition(status) || absl::IsInvalidArgument(status) || absl::IsUnimplemented(status);
}

bool AbsentRanks::Refused(int rank, std::string why, uint64_t ticks, absl::Time now) {
  Refusal& refusal = refusals_[rank];
  const bool is_news = refusal.why != why;
  refusal = {std::move(why), ticks, now};
  return is_news;
}

bool AbsentRanks::WaitsInVain(uint64_t start_ticks, absl::Time now) const {
  return std::any_of(refusals_.begin(), refusals_.end(), [&](const auto& entry) {
    const Refusal& refusal = entry.second;
    return now - refusal.time < kOneAttempt && start_ticks <= refusal.ticks;
  });
}

std::vector<int> AbsentRanks::refused() const {
  std::vector<int> ranks;
  for (const auto& [rank, refusal] : refusals_) {
    ranks.push_back(rank);
  }
  return ranks;
}

std::string AbsentRanks::WhyRefused(int rank) const {
  std::string text;
  for (const auto& [other, refusal] : refusals_) {
    if (rank < 0 || rank == other) {
      absl::StrAppend(&text, text.empty() ? "" : "; ", "rank ", other, " was refused: ", refusal.why);
    }
  }
  return text;
}

void AbsentRanks::SessionEnded(int rank, pid_t pid, UniqueFd process) {
  if (process.valid()) {
    processes_[rank] = {pid, std::move(process)};
  }
}

std::vector<AbsentRanks::Ended> AbsentRanks::TakeEnded() {
  std::vector<Ended> ended;
  for (auto it = processes_.begin(); it != processes_.end();) {
    pollfd state{it->second.fd.get(), POLLIN, 0};
    if (poll(&state, 1, 0) == 1) {
      ended.push_back({it->first, it->second.pid});
      it = processes_.erase(it);
    } else {
      ++it;
    }
  }
  return ended;
}

void AbsentRanks::Came(int rank) {
  refusals_.erase(rank);
  processes_.erase(rank);
}

}  // namespace shardd
