#include "server/job/command_intake.h"

#include <utility>

#include "common/clock/monotonic_now.h"
#include "server/job/job_part.h"
#include "server/job/membership/sessions.h"
#include "server/job/step/committed.h"
#include "server/session/session.h"

namespace shardd {

bool CommandIntake::PollRings(absl::Time until, bool found) {
  const int ranks = static_cast<int>(sessions_->by_rank().size());
  const uint64_t epoch = committed_->epoch();
  const int first = next_polled_;
  for (int i = 0; i < ranks; ++i) {
    const int rank = (first + i) % ranks;
    Session* const session = (*sessions_)[rank].get();
    // Bounded in number too.
    for (uint32_t taken = 0; session != nullptr && taken < kRingRecords / 4; ++taken) {
      if (taken > 0 && session->last_command_time >= until) {  // when the last one began
        next_polled_ = (rank + 1) % ranks;
        return true;
      }
      absl::StatusOr<RankCommand> command = session->NextFromRing();
      if (absl::IsNotFound(command.status())) break;
      found = true;
      if (!Run(session, std::move(command))) break;
      if (session->held) {
        session->consumes_when_released = true;
        break;
      }
      session->PublishConsumed();
    }
    if (committed_->epoch() != epoch) {
      return true;  // the sessions are gone
    }
    if (found && MonotonicNow() >= until) {
      next_polled_ = (rank + 1) % ranks;
      return true;
    }
  }
  return found;
}

int CommandIntake::ExecuteFromStream(Session* session, const v1::CommandBatch& batch, int first, absl::Time until) {
  const int end = batch.commands_size();
  for (int i = first; i < end; ++i) {
    if (session->held) return i;
    if (session->broken) return end;
    if (i > first && session->last_command_time >= until) {  // when the last one began
      return i;                                              // a batch is as long as its client likes
    }
    if (!Run(session, session->Decode(batch.commands(i)))) return end;
    if (session->words().told() == nullptr) continue;  // who has a ring does not count these
    if (session->held) {
      session->consumes_when_released = true;
    } else {
      session->PublishConsumed();
    }
  }
  return end;
}

bool CommandIntake::Run(Session* session, absl::StatusOr<RankCommand> command) {
  const uint64_t epoch = committed_->epoch();
  const int rank = session->rank();
  absl::Status status = command.status();
  if (status.ok()) {
    status = execute_(session, *std::move(command));
  }
  if (committed_->epoch() != epoch || (*sessions_)[rank].get() != session) {
    return false;  // it has ended
  }
  if (!status.ok()) {
    job_->Fail(std::move(status));
    if (committed_->epoch() == epoch) {
      session->broken = true;  // a commit is under way, and the end of the epoch follows it
    }
    return false;
  }
  return true;
}

}  // namespace shardd
