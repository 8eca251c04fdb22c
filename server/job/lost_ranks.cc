// A rank leaves or is lost; the ways in which an epoch ends (behind a step, before a pass, at once); the job's end.
// SessionLost is called by who notices: server/job/rank_sessions.cc (the process has ended),
// server/daemon/core_serve.cc (its stream has), server/daemon/core_attach.cc (another takes its place).

#include <fcntl.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/job_core.h"
#include "server/loop/core_loop.h"
#include "server/session/session.h"
#include "server/session/session_stream.h"

namespace shardd {
namespace {

constexpr int kQuietTimes = 5;  // ranks that may store are given so often the time of others

v1::SessionEvent Aborted(const Committed& committed, absl::StatusCode code, std::string message) {
  v1::SessionEvent event;
  v1::SessionEvent::Aborted* aborted = event.mutable_aborted();
  aborted->set_epoch(committed.epoch());
  aborted->set_code(static_cast<int>(code));
  aborted->set_message(std::move(message));
  aborted->set_committed_step(committed.step());
  return event;
}

// The last that a session's client hears.
void Farewell(const Session& session, v1::SessionEvent event) {
  if (session.stream != nullptr) {
    session.stream->Send(std::move(event));
    session.stream->Finish(absl::OkStatus());
  }
}

}  // namespace

void JobCore::EndDetached(int rank, bool finished) {
  Session* session = sessions_[rank].get();
  if (commits_.steps().stepped(rank) || commits_.decision().committing()) {
    leavers_.Defer(rank, finished);  // its step is still to be committed
    return;
  }
  const bool in_order = finished && leavers_.LeavesInOrder(rank);
  if (in_order && leavers_.OthersNeedGradientsOf(rank, gradients_.reductions().under_way())) {
    leavers_.Defer(rank, /*finished=*/true);  // they close backwards first
    return;
  }
  // The other nodes may wait for what all ranks of this one have asked for.
  const bool extends = nodes_.over_nodes() && !extensions_.by_rank().empty();
  committed_.ForgetProcess(rank, finished);  // the next daemon knows what the rank is told now
  v1::SessionEvent event;
  event.mutable_detached();
  Farewell(*session, std::move(event));
  events_.Add(rank, "detach", finished ? "finished" : "the job is kept");
  EndSession(rank);
  // Behind the session, and before one that comes again: on the same thread.
  devices_.memory_worker()->Post([slots = memory_->rank_slots(), rank] {
    if (slots != nullptr) slots->Drop(rank);
  });
  leavers_.Left(rank, finished);
  const bool between_parts = commits_.decision().parts() > 0;
  if (in_order && !extends && !between_parts) {
    return;  // with the backwards that it has closed; a step comes to nothing (CheckNobodyFinished)
  }
  // With nobody else attached it only drops what the rank had begun.
  if (!finished || extends || leavers_.AnyMidway() || between_parts) {
    Abort(committed_.RankError(absl::StatusCode::kAborted, rank, "session",
                               !finished ? "the rank detached"
                               : extends ? "the rank finished while ranks asked to train more"
                                         : "the rank finished while others were in a step"),
          {rank});
    return;
  }
  parts_.Forget(rank);
}

void JobCore::SessionLost(int rank, const std::string& why, bool replaced) {
  Session* session = sessions_[rank].get();
  const bool known = std::exchange(session->lost, true);
  if (!known) sessions_.ForgetProcess(*session);
  const bool committing = commits_.decision().committing();
  // Else it has done its part of the step and said good-bye: its gradients are here.
  const bool is_needed = !leavers_.leaving(rank) || (!committing && sessions_.attached() < world_size());
  if (!known && is_needed) {
    const std::string last =
        session->last_command().empty() ? "no command yet" : absl::StrCat("last command: ", session->last_command());
    events_.Add(rank, "lost", absl::StrCat(why, "; ", last));
    Abort(committed_.RankError(absl::StatusCode::kAborted, rank, "session",
                               absl::StrCat("rank ", rank, " is lost: ", why, "; ", last)),
          {rank});
  } else if (replaced && leavers_.leaving_finished(rank) && !commits_.steps().stepped(rank) && !committing) {
    Abort(
        committed_.RankError(absl::StatusCode::kAborted, rank, "session", absl::StrCat("rank ", rank, " was replaced")),
        {rank});
  }  // else a commit under way comes first
}

bool JobCore::EndBehindStep(const absl::Status& cause) {
  if (!nodes_.over_nodes()) return AwaitEndBehindStep(cause);
  if (sessions_.attached() < world_size()) return false;
  nodes_.steps().EndAttemptBehindStep(cause);
  return true;
}

// Ranks that edit do it behind the daemon's step, and what they store there would be lost: the next pass has it.
bool JobCore::EndsBeforePass() const {
  return plan()->config.optimizer().kind() != v1::OPTIMIZER_KIND_TRAINER &&
         (writes_.pass_copies() || memory_->kept() != nullptr);
}

bool JobCore::MayEndBeforePass() const {
  const Passes& passes = writes_.passes();
  return end_.awaits_pass() && !view_.IsBeyondPass() &&
         (!writes_.pass_copies() || (passes.copied() && !passes.told() && snapshots_.snapshot().fresh()));
}

// A host that goes on has its streams store behind this pass, also where nobody waits for its copies any more, because
// this daemon has died. The next one completes a snapshot of shards into which nobody stores.
bool JobCore::MayTellOfPass() const {
  const bool takes_snapshot = memory_->kept() == nullptr || snapshots_.snapshot().IsDueWithPass();
  return !end_.awaits_step() && !end_.awaits_pass() && !(takes_snapshot && committed_.outlives_daemon());
}

// Where ranks update, they make a step where its pass begins: the epoch ends behind one of which the snapshot is, and
// hosts that are ahead of their GPUs have not been told of that pass.
bool JobCore::AwaitEndBehindStep(const absl::Status& cause) {
  if (absent_.SomeStayAway()) return false;  // nobody makes a step without them
  snapshots_.TakeWithEach();
  if (EndsBeforePass()) {
    end_.AwaitPass(cause);
    return true;
  }
  end_.AwaitStep(cause, [this] {
    const bool ahead = memory_->place().memory != nullptr && writes_.passes().told();
    if (writes_.pass_copies() && (ahead || !snapshots_.snapshot().taken_with_commit())) return false;
    // Nobody begins the next step in this epoch: who waits for the step is told by its stream.
    for (const auto& session : sessions_) {
      if (session != nullptr) session->Poison(committed_.epoch() + 1);
    }
    return true;
  });
  return true;
}

// A forward may have begun with commands that nobody was woken for.
void JobCore::EndIfIdle(const absl::Status& cause, absl::Duration quiet) {
  PollRings();
  if (!nodes_.over_nodes() && absent_.SomeStayAway()) {  // who was on the way has died
    Abort(cause, {});
    return;
  }
  const absl::Time now = MonotonicNow();
  const auto idle_for = [&](absl::Duration time) {
    return std::all_of(sessions_.begin(), sessions_.end(), [&](const auto& session) {
      return session == nullptr || now - session->last_command_time >= time;
    });
  };
  if (view_.IsMidStep() || sessions_.attached() == 0) return;
  // What ranks have stored meanwhile would be lost, and where they update, that is a step. Other jobs wait for this
  // one.
  const bool may_store = writes_.pass_copies() || end_.awaits_pass();
  if (idle_for(may_store ? kQuietTimes * quiet : quiet)) {
    EndEpoch({cause, {}, /*behind_commit=*/!writes_.pass_copies()});
  }
}

void JobCore::EndEpoch(EpochEnd::Pending end) {
  auto& [cause, lost_ranks, behind_commit] = end;
  if (end_.closed()) {
    return;
  }
  if (absl::IsDataLoss(cause) && memory_->place().memory != nullptr) {
    Close(absl::StrCat("what lay on its device is lost: ", cause.message()));  // there is nothing to go back to
    return;
  }
  if (!end_.MayBegin()) {
    end_.Await(std::move(end));
    if (!commits_.decision().committing()) {
      nodes_.WantsToEnd(end_.cause());
    }
    return;
  }
  end_.Await(std::move(end));  // another may wait, which is no second one
  end = end_.Take();
  const auto extensions = extensions_.TakeAll();
  end_.Begins();
  commits_.decision().applied() ? committed_.EndEpochBehindStep() : committed_.EndEpoch();
  // What it costs is the difference: outside of a step ranks attach again, and nothing is done anew.
  const bool drops_work = !behind_commit && view_.IsMidStep();
  counters_.set_aborts(counters_.aborts() + (drops_work ? 1 : 0));
  events_.Add(-1, drops_work ? "abort" : "epoch", std::string(cause.message()));
  meter_.EpochEnds(cause, !lost_ranks.empty(), behind_commit, drops_work);
  nodes_.AttemptEnded(cause);
  if (!commits_.decision().applied()) values_.Undo();  // else its parts are committed with it, below
  if (end_.closed()) {
    Extensions::Answer(extensions, cause);
    return;
  }
  snapshots_.GoBackIfStored();
  for (const auto& session : sessions_) {  // everybody is let go before memory is unmapped
    if (session != nullptr) session->Poison(committed_.epoch());
  }
  const std::vector<int> refused = absent_.refused();
  for (int rank = 0; rank < world_size(); ++rank) {
    Session* session = sessions_[rank].get();
    if (session == nullptr) continue;
    if (session->pidfd.valid() && !session->lost) {
      absent_.SessionEnded(rank, session->peer.pid, UniqueFd(fcntl(session->pidfd.get(), F_DUPFD_CLOEXEC, 0)));
    }
    v1::SessionEvent event = Aborted(committed_, cause.code(), std::string(cause.message()));
    v1::SessionEvent::Aborted* aborted = event.mutable_aborted();
    if (absent_.WaitsInVain(session->start_ticks, MonotonicNow())) {
      aborted->mutable_refused_ranks()->Add(refused.begin(), refused.end());
    }
    aborted->set_trainer_state(committed_.trainer_states()[rank]);
    aborted->set_behind_commit(behind_commit);
    aborted->mutable_lost_ranks()->Add(lost_ranks.begin(), lost_ranks.end());
    Farewell(*session, std::move(event));
    renewal_.EpochEnded(*session);
    EndSession(rank);
  }
  if (commits_.decision().applied()) {
    commits_.CommitStep();
  }
  parts_.EndEpoch();
  Extensions::Answer(extensions, cause);  // behind what ended the sessions
  Advance();
}

void JobCore::Close(const std::string& why, CloseOn on) {
  if (end_.closed()) {
    return;
  }
  events_.Add(-1, "close", why);
  const std::string message = absl::StrCat("job \"", name(), "\" was closed: ", why);
  const auto extensions = extensions_.TakeAll();
  committed_.EndLastEpoch();
  end_.Close();
  for (int rank = 0; rank < world_size(); ++rank) {
    if (Session* session = sessions_[rank].get(); session != nullptr) {
      session->Poison(committed_.epoch());
      // What goes on is there to attach to again.
      const bool goes_on = on == CloseOn::kThisDaemon;
      Farewell(*session,
               Aborted(committed_, goes_on ? absl::StatusCode::kAborted : absl::StatusCode::kNotFound, message));
      EndSession(rank);
    }
  }
  nodes_.Close(
      why, {.everywhere = on == CloseOn::kAllNodes, .goes_on = on == CloseOn::kThisDaemon || on == CloseOn::kReplaced});
  waits_.EndEpoch();
  trace_.EndAll(why);
  Extensions::Answer(extensions, absl::AbortedError(message));
}

}  // namespace shardd
