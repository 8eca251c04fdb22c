#include "server/job/membership/silence.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/job/membership/sessions.h"
#include "server/job/step/committed.h"
#include "server/session/session.h"

namespace shardd {
namespace {

// Whoever gives up and goes on does so soon.
constexpr int kOfSilenceAfterGivingUp = 12;
constexpr absl::Duration kLeastSilence = absl::Seconds(1);

}  // namespace

absl::Status CheckSilentRanks(const Sessions& sessions, const Committed& committed, absl::Duration limit,
                              absl::Time now, absl::FunctionRef<Wait(int rank)> waiting_for, int* silent) {
  const int ranks = static_cast<int>(sessions.by_rank().size());
  std::vector<Wait> waits;  // by rank, once some rank is silent
  for (int rank = 0; rank < ranks; ++rank) {
    if (sessions[rank] == nullptr) continue;  // it has finished
    const Session& session = *sessions[rank];
    const absl::Duration silence = now - std::max(session.last_command_time, session.words().last_progress_time());
    const absl::Duration allowed =
        session.gave_up ? std::min(limit, std::max(limit / kOfSilenceAfterGivingUp, kLeastSilence)) : limit;
    if (silence < allowed || session.held) {  // held: it is not the rank that takes so long
      continue;
    }
    for (int other = static_cast<int>(waits.size()); other < ranks; ++other) {
      waits.push_back(sessions[other] == nullptr ? Wait() : waiting_for(other));
    }
    // Silent is only a fault when somebody else waits for this very rank.
    for (int other = 0; other < ranks; ++other) {
      if (other == rank || waits[other].rank != rank) {
        continue;
      }
      *silent = rank;
      const char* const gave_up =
          session.gave_up ? " after its program gave up a forward or backward, as where one raises" : "";
      return committed.RankError(
          absl::StatusCode::kDeadlineExceeded, rank, "silence",
          absl::StrCat("rank ", rank, " has sent nothing for ", absl::FormatDuration(silence), gave_up,
                       " (last command: ", session.last_command().empty() ? "none" : session.last_command(), "; limit ",
                       absl::FormatDuration(allowed), "); rank ", other, " waits for rank ", rank, ": ",
                       waits[other].call));
    }
  }
  return absl::OkStatus();
}

}  // namespace shardd
