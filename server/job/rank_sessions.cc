// Ranks come with a session, and say that they leave; how a session ends: lost_ranks.cc.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/device/device.h"
#include "server/job/job_core.h"
#include "server/loop/core_loop.h"
#include "server/session/session.h"
#include "server/session/session_stream.h"

namespace shardd {

absl::Status JobCore::CheckMayAttach(int rank, int32_t pid, bool replace, const UniqueFd& process) {
  const std::string what = absl::StrCat("attach rank ", rank, " of job \"", name(), "\": ");
  if (snapshots_.awaits_writers()) {
    const std::string not_killed = snapshots_.Attaching(rank, pid, process, replace);
    Advance();  // the rank may have been the last that could store
    SHARDD_RETURN_IF_ERROR(snapshots_.CheckWriters(what, not_killed));
  }
  SHARDD_RETURN_IF_ERROR(renewal_.Settle(what, rank, waits_.MayAttach(what, rank, pid, replace)));
  return renewal_.MayAttach(what, rank, pid, process, replace);
}

absl::Status JobCore::AddSession(std::unique_ptr<Session>&& session) {
  const int rank = session->rank();
  const std::string what = absl::StrCat("attach rank ", rank, " of job \"", name(), "\": ");
  if (end_.closed()) {
    return absl::NotFoundError(absl::StrCat(what, "the job was closed"));
  }
  if (session->epoch() != committed_.epoch()) {
    return absl::AbortedError(absl::StrCat(what, "the epoch advanced (got ", session->epoch(), ", want ",
                                           committed_.epoch(), "); attach again"));
  }
  if (end_.pending()) {
    return absl::AbortedError(absl::StrCat(what, "the epoch ends (", end_.cause().message(), "); attach again"));
  }
  SHARDD_RETURN_IF_ERROR(CheckMayAttach(rank, session->peer.pid, /*replace=*/false, session->pidfd));
  SHARDD_RETURN_IF_ERROR(parts_.CheckMayBegin(what));
  SHARDD_RETURN_IF_ERROR(view_.CheckStillHas(*session));
  if (sessions_[rank] != nullptr) {
    return absl::AlreadyExistsError(absl::StrCat(what, "the rank has a live session (session=", sessions_[rank]->id(),
                                                 ", pid=", sessions_[rank]->peer.pid,
                                                 "); end it first, or attach with replace"));
  }
  if (leavers_.finished(rank) && gradients_.pairing().closed(rank) > 0) {
    Abort(
        committed_.RankError(absl::StatusCode::kAborted, rank, "attach", "the rank comes back in the middle of a step"),
        {});
    return absl::AbortedError(absl::StrCat(what, "the epoch advanced; attach again"));
  }
  session->words().PublishVersion(committed_.version());
  session->last_command_time = MonotonicNow();
  leavers_.Came(rank);
  UniqueFd pidfd = std::move(session->pidfd);
  committed_.SetProcess(rank, {session->peer.pid, session->peer.uid, session->start_ticks});
  absent_.Came(rank);
  sessions_.Add(std::move(session));
  trace_.SessionBegins(sessions_[rank].get());
  WatchProcess(sessions_[rank].get(), std::move(pidfd));
  waits_.sums().SessionBegins(*sessions_[rank]);
  counters_.set_attaches(counters_.attaches() + 1);
  meter_.SessionBegins();
  return absl::OkStatus();
}

void JobCore::RankAnswered(int rank, const absl::Status& status, uint64_t ticks) {
  if (!end_.closed()) {
    absent_.Answered(rank, status, ticks, MonotonicNow());
    Advance();
  }
}

void JobCore::WatchProcess(Session* session, UniqueFd pidfd) {
  sessions_.WatchProcess(session, std::move(pidfd),
                         [this, rank = session->rank()] { SessionLost(rank, "its process ended"); });
}

void JobCore::SessionLive(Session* session, std::shared_ptr<SessionStream> stream) {
  session->stream = std::move(stream);
  const int rank = session->rank();
  v1::SessionEvent event;
  event.mutable_attached();
  session->stream->Send(std::move(event));
  events_.Add(
      rank, "attach",
      absl::StrCat("session ", session->id(), ", pid ", session->peer.pid, ", ", devices_.by_rank()[rank]->name()));
  Advance();
}

void JobCore::EndSession(int rank) {
  Session* session = sessions_[rank].get();
  sessions_.Unwatch(*session);
  parts_.SessionEnds(session);  // who keeps the descriptor of its process takes it, which nobody watches any more
  sessions_.PostReleased(session);
  devices_.memory_worker()->Post([gone = sessions_.Take(rank)] {});
}

void JobCore::Detach(int rank, bool finished) {
  EndDetached(rank, finished);
  Advance();
}

}  // namespace shardd
