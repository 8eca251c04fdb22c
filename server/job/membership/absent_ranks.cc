#include "server/job/membership/absent_ranks.h"

#include <poll.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/job/job_events.h"
#include "server/job/membership/leavers.h"
#include "server/job/membership/past_process.h"
#include "server/job/membership/sessions.h"
#include "server/session/session.h"

namespace shardd {

bool IsFinalRefusal(const absl::Status& status) {
  return absl::IsFailedPrecondition(status) || absl::IsInvalidArgument(status) || absl::IsUnimplemented(status);
}

void AbsentRanks::Answered(int rank, const absl::Status& status, uint64_t ticks, absl::Time now) {
  const int ranks = static_cast<int>(see_.sessions->by_rank().size());
  if (!IsFinalRefusal(status) || rank < 0 || rank >= ranks || (*see_.sessions)[rank] != nullptr ||
      see_.leavers->finished(rank)) {
    return;
  }
  std::string why(status.message());
  Refusal& refusal = refusals_[rank];
  if (refusal.why != why) {
    events_->Add(rank, "refused", why);
  }
  refusal = {std::move(why), ticks, now};
}

bool AbsentRanks::WaitsInVain(uint64_t start_ticks, absl::Time now) const {
  return std::any_of(refusals_.begin(), refusals_.end(), [&](const auto& entry) {
    const Refusal& refusal = entry.second;
    // A process of the same tick (10 ms) counts as started later: one that waits has taken longer to come so far.
    return now - refusal.time < kOneAttempt && start_ticks < refusal.ticks;
  });
}

bool AbsentRanks::SomeWaitInVain(absl::Time now) const {
  return !refusals_.empty() && std::any_of(see_.sessions->begin(), see_.sessions->end(), [&](const auto& session) {
    return session != nullptr && session->stream != nullptr && WaitsInVain(session->start_ticks, now);
  });
}

absl::Status AbsentRanks::RefusedError() const {
  return absl::FailedPreconditionError(
      absl::StrCat("job \"", job_, "\" waits for a rank that does not come: ", WhyRefused()));
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

void AbsentRanks::TellEnded() {
  for (auto it = processes_.begin(); it != processes_.end();) {
    pollfd state{it->second.fd.get(), POLLIN, 0};
    if (poll(&state, 1, 0) == 1) {
      events_->Add(it->first, "lost",
                   absl::StrCat("its process (pid ", it->second.pid,
                                ") ended without attaching again; its session had ended with its epoch"));
      it = processes_.erase(it);
    } else {
      ++it;
    }
  }
}

void AbsentRanks::Came(int rank) {
  refusals_.erase(rank);
  processes_.erase(rank);
}

bool AbsentRanks::Some() const {
  for (size_t rank = 0; rank < see_.sessions->by_rank().size(); ++rank) {
    if (see_.sessions->by_rank()[rank] == nullptr && !see_.leavers->finished(static_cast<int>(rank))) return true;
  }
  return false;
}

bool AbsentRanks::SomeStayAway() const {
  for (int rank = 0; rank < static_cast<int>(see_.sessions->by_rank().size()); ++rank) {
    if ((*see_.sessions)[rank] != nullptr || see_.leavers->finished(rank)) continue;
    const auto it = processes_.find(rank);
    if (it == processes_.end() || refusals_.contains(rank) || HasEnded(it->second.fd, it->second.pid)) return true;
  }
  return false;
}

}  // namespace shardd
