// Who is there: sessions come, detach and are lost; the epoch advances; the job ends.

#include <fcntl.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/job_core.h"
#include "server/observe/log.h"

namespace shardd {

bool JobCore::finished() const {
  return RanksFinished() && (nodes_ == nullptr || (plan_->cut_over_nodes ? nodes_->member().OthersFinished()
                                                                         : nodes_->member().AllServed()));
}

bool JobCore::RanksFinished() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const RankStep& rank) { return rank.finished; });
}

absl::Status JobCore::CheckMayAttach(int rank, int32_t pid, bool replace, const UniqueFd& process) {
  SHARDD_RETURN_IF_ERROR(CheckWriters(rank, pid, replace));
  SHARDD_RETURN_IF_ERROR(CheckStragglers(rank, pid, replace));
  const std::string what = absl::StrCat("attach rank ", rank, " of job \"", name(), "\": ");
  const AttachAnswer answer = renewal_.MayAttach(what, rank, pid, process, replace);
  FreeLeftGradients();
  return Settle(rank, what, answer);
}

absl::Status JobCore::AddSession(std::unique_ptr<Session>&& session) {
  const int rank = session->rank();
  if (closed_) {
    return absl::NotFoundError(absl::StrCat("attach rank ", rank, " of job \"", name(), "\": the job was closed"));
  }
  if (session->epoch() != committed_.epoch()) {
    return absl::AbortedError(absl::StrCat("attach rank ", rank, " of job \"", name(), "\": the epoch advanced (got ",
                                           session->epoch(), ", want ", committed_.epoch(), "); attach again"));
  }
  SHARDD_RETURN_IF_ERROR(CheckMayAttach(rank, session->peer.pid, /*replace=*/false, session->pidfd));
  if (node_gathers_ != nullptr && RanksFinished()) {  // other nodes know, and count on no word of this one any more
    return absl::AbortedError(absl::StrCat("attach rank ", rank, " of job \"", name(),
                                           "\": all ranks of this node have finished, and its daemon serves the "
                                           "other nodes until theirs have, too; attach again, or use another name"));
  }
  if (snapshot_.going_back()) {
    return absl::AbortedError(absl::StrCat("attach rank ", rank, " of job \"", name(),
                                           "\": its shards go back to the copy of step ", snapshot_.step(),
                                           "; attach again"));
  }
  if (!IsKeptForStores()) {
    return absl::AbortedError(absl::StrCat("attach rank ", rank, " of job \"", name(),
                                           "\": a copy of its shards to go back to is being taken; attach again"));
  }
  if (undo_.undoing()) {
    return absl::AbortedError(absl::StrCat("attach rank ", rank, " of job \"", name(),
                                           "\": what was written and not committed is being taken back; attach again"));
  }
  if (const std::string lacking = nodes_ == nullptr ? "" : nodes_->member().Lacking(); !lacking.empty()) {
    return absl::AbortedError(
        absl::StrCat("attach rank ", rank, " of job \"", name(), "\": ", lacking, "; attach again"));
  }
  SHARDD_RETURN_IF_ERROR(CheckStillHas(*session));
  if (reading_values_) {
    return absl::AbortedError(absl::StrCat("attach rank ", rank, " of job \"", name(),
                                           "\": initial values of the epoch that ended are still being read; attach "
                                           "again"));
  }
  if (gradient_work_ > 0) {  // it would write into what the rank is about to give
    return absl::AbortedError(absl::StrCat("attach rank ", rank, " of job \"", name(),
                                           "\": work on gradients of the epoch that ended is still under way; attach "
                                           "again"));
  }
  if (sessions_[rank] != nullptr) {
    return absl::AlreadyExistsError(absl::StrCat(
        "attach rank ", rank, " of job \"", name(), "\": the rank has a live session (session=", sessions_[rank]->id(),
        ", pid=", sessions_[rank]->peer.pid, "); end it first, or attach with replace"));
  }
  if (ranks_[rank].finished && pairing_.closed(rank) > 0) {
    Abort(RankError(absl::StatusCode::kAborted, rank, "attach", "the rank comes back in the middle of a step"), {});
    return absl::AbortedError(
        absl::StrCat("attach rank ", rank, " of job \"", name(), "\": the epoch advanced; attach again"));
  }
  session->words().PublishVersion(committed_.version());
  session->last_command_time = MonotonicNow();
  ranks_[rank].finished = finished_said_ = false;
  UniqueFd pidfd = std::move(session->pidfd);
  absent_.Came(rank);
  sessions_.Add(std::move(session));
  trace_.SessionBegins(sessions_[rank].get());
  WatchProcess(sessions_[rank].get(), std::move(pidfd));
  sums_.SessionBegins(*sessions_[rank]);
  counters_.set_attaches(counters_.attaches() + 1);
  return absl::OkStatus();
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
  Event(rank, "attach",
        absl::StrCat("session ", session->id(), ", pid ", session->peer.pid, ", ", devices_[rank]->name()));
  Advance();
}

void JobCore::EndSession(int rank) {
  Session* session = sessions_[rank].get();
  trace_.SessionEnds(session);
  sessions_.Unwatch(*session);
  sums_.SessionEnds(session);
  for (auto& closure : std::exchange(session->when_released, {})) {
    loop_->Post(std::move(closure));
  }
  unshards_.EndSession(rank);
  memory_worker_->Post([gone = sessions_.Take(rank)] {});
  if (extensions_.building()) {
    (void)extensions_.TakeAll();
  }
  (void)EndAsking(rank);
}

void JobCore::Detach(int rank, bool finished) {
  EndDetached(rank, finished);
  Advance();
}

void JobCore::EndDetached(int rank, bool finished) {
  Session* session = sessions_[rank].get();
  if (ranks_[rank].stepped || decision_.committing()) {
    ranks_[rank].pending_detach = finished;  // its step is still to be committed
    return;
  }
  const bool in_order = finished && LeavesInOrder(rank);
  if (in_order && OthersNeedGradientsOf(rank)) {
    ranks_[rank].pending_detach = true;  // they close backwards first
    return;
  }
  v1::SessionEvent event;
  event.mutable_detached();
  if (session->stream != nullptr) {
    session->stream->Send(std::move(event));
    session->stream->Finish(absl::OkStatus());
  }
  Event(rank, "detach", finished ? "finished" : "the job is kept");
  EndSession(rank);
  ranks_[rank].finished = finished;
  if (in_order) {
    return;  // with the backwards that it has closed; a step comes to nothing (CheckNobodyFinished)
  }
  // Whoever was let in to read, full parameters or in a pass, needs nobody any more; everything else that ranks do
  // together does. So a rank may be the first to leave the pass that its last step was committed with, or that was a
  // forward alone: whoever goes on to a backward, or to another pass, is told then (CheckNobodyFinished).
  bool midway = pairing_.any_seen();
  for (int other = 0; other < world_size(); ++other) {
    const RankStep& r = ranks_[other];
    const bool only_reads = full_params_.inside(other) && !full_params_.writes(other) && !r.finished;
    midway = midway || r.stepped || windows_.open(other) || passes_.entering(other) || r.committed_params ||
             pairing_.closed(other) > 0 || (full_params_.asked(other) && !only_reads);
  }
  if (!finished || midway) {  // with nobody else attached it only drops what the rank had begun
    Abort(RankError(absl::StatusCode::kAborted, rank, "session",
                    finished ? "the rank finished while others were in a step" : "the rank detached"),
          {rank});
    return;
  }
  // A successor begins with nothing of its predecessor's.
  ranks_[rank] = RankStep();
  pairing_.Forget(rank);
  ranks_[rank].finished = true;
  orders_.ForgetStep(rank);
  unshards_.Leave(rank);
  full_params_.Forget(rank);
  passes_.Forget(rank);
  windows_.Forget(rank);
}

// In the middle of a step, but with whole backwards, and nobody waits for anything else of it.
bool JobCore::LeavesInOrder(int rank) const {
  if (pairing_.closed(rank) == 0 || !passes_.outside(rank) || windows_.open(rank) || windows_.wants(rank)) {
    return false;
  }
  // Of backwards that it has not closed, nobody has begun one: not the rank, nor another that would wait for it.
  if (pairing_.SomeGaveFrom(pairing_.closed(rank))) {
    return false;
  }
  for (int other = 0; other < world_size(); ++other) {
    const RankStep& r = ranks_[other];
    if (r.stepped || windows_.open(other) || passes_.entering(other) || r.committed_params ||
        full_params_.asked(other)) {
      return false;
    }
  }
  return true;
}

bool JobCore::OthersNeedGradientsOf(int rank) const {
  if (pending_reductions_ > 0 || AwaitsNodes()) {
    return true;
  }
  for (int other = 0; other < world_size(); ++other) {
    if (!ranks_[other].finished && pairing_.closed(other) < pairing_.closed(rank)) {
      return true;
    }
  }
  return false;
}

bool JobCore::DropHeld(int rank) {
  if (sessions_[rank] == nullptr || ranks_[rank].pending_detach != true || ranks_[rank].stepped ||
      decision_.committing()) {
    return false;
  }
  Abort(RankError(absl::StatusCode::kAborted, rank, "session", absl::StrCat("rank ", rank, " was replaced")), {rank});
  return true;
}

// A rank that said good-bye before its step was committed, or with backwards that others had not closed, and that may
// go now; -1: there is none.
int JobCore::LeaverAt() const {
  for (int rank = 0; rank < world_size(); ++rank) {
    const RankStep& state = ranks_[rank];
    if (state.pending_detach.has_value() && sessions_[rank] != nullptr && !state.stepped &&
        !(*state.pending_detach && LeavesInOrder(rank) && OthersNeedGradientsOf(rank))) {
      return rank;
    }
  }
  return -1;
}

void JobCore::SessionLost(int rank, const std::string& why) {
  Session* session = sessions_[rank].get();
  if (std::exchange(session->lost, true)) {
    return;  // known; a commit under way comes first
  }
  sessions_.ForgetProcess(*session);
  if (ranks_[rank].pending_detach.has_value() && (decision_.committing() || attached() == world_size())) {
    return;  // it has done its part of the step and said good-bye; its gradients are here
  }
  const std::string last =
      session->last_command.empty() ? "no command yet" : absl::StrCat("last command: ", session->last_command);
  Event(rank, "lost", absl::StrCat(why, "; ", last));
  Abort(RankError(absl::StatusCode::kAborted, rank, "session",
                  absl::StrCat("rank ", rank, " is lost: ", why, "; ", last)),
        {rank});
}

void JobCore::Abort(absl::Status cause, std::vector<int> lost_ranks) {
  if (closed_) {
    return;
  }
  if (absl::IsDataLoss(cause) && memory_->place().memory != nullptr) {
    Close(absl::StrCat("what lay on its device is lost: ", cause.message()));  // there is nothing to go back to
    return;
  }
  if ((decision_.committing() && (!decision_.applied() || MayShow())) || promised()) {
    // A decided step always completes forward, with the copy that is kept of it; those who died in between are found
    // out afterwards. On several nodes it may be decided already, and node 0 says whether (NodeAbort, NodeDecided).
    // Only a step that is applied and may not be shown yet ends here, unshown.
    if (!pending_abort_.has_value()) {
      pending_abort_.emplace(std::move(cause), std::move(lost_ranks));
    } else {
      pending_abort_->second.insert(pending_abort_->second.end(), lost_ranks.begin(), lost_ranks.end());
    }
    if (!decision_.committing()) {
      nodes_->member().WantsToEnd(pending_abort_->first);
    }
    return;
  }
  const auto extensions = extensions_.TakeAll();
  committed_.EndEpoch();
  if (node_gathers_ != nullptr) node_gathers_->EndEpoch();
  // What it costs is the difference: outside of a step ranks attach again, and nothing is done anew.
  const bool drops_work = IsMidStep();
  counters_.set_aborts(counters_.aborts() + (drops_work ? 1 : 0));
  Event(-1, drops_work ? "abort" : "epoch", std::string(cause.message()));
  if (nodes_ != nullptr) {
    nodes_->member().AttemptEnded(cause);
  }
  UndoWrites();
  if (closed_) {
    Extensions::Answer(extensions, cause);
    return;
  }
  if (windows_.any_since_version() || (pass_copies() && snapshot_.whole() && !snapshot_.going_back())) {
    GoBackToKept();
  }
  for (const auto& session : sessions_) {  // everybody is let go before memory is unmapped
    if (session != nullptr) {
      session->Poison(committed_.epoch());
    }
  }
  const std::vector<int> refused = absent_.refused();
  for (int rank = 0; rank < world_size(); ++rank) {
    Session* session = sessions_[rank].get();
    if (session == nullptr) {
      continue;
    }
    if (session->pidfd.valid() && !session->lost) {
      absent_.SessionEnded(rank, session->peer.pid, UniqueFd(fcntl(session->pidfd.get(), F_DUPFD_CLOEXEC, 0)));
    }
    if (session->stream != nullptr) {
      v1::SessionEvent event;
      v1::SessionEvent::Aborted* aborted = event.mutable_aborted();
      if (absent_.WaitsInVain(session->start_ticks, MonotonicNow())) {
        aborted->mutable_refused_ranks()->Add(refused.begin(), refused.end());
      }
      aborted->set_epoch(committed_.epoch());
      aborted->set_code(static_cast<int>(cause.code()));
      aborted->set_message(std::string(cause.message()));
      aborted->set_committed_step(committed_.step());
      aborted->set_trainer_state(committed_.trainer_states()[rank]);
      for (int lost : lost_ranks) {
        aborted->add_lost_ranks(lost);
      }
      session->stream->Send(std::move(event));
      session->stream->Finish(absl::OkStatus());
    }
    renewal_.EpochEnded(*session);
    EndSession(rank);
  }
  if (decision_.applied()) {
    CommitUnshown();
  }
  ResetStep();
  Extensions::Answer(extensions, cause);  // behind what ended the sessions
  Advance();
}

void JobCore::ResetStep() {
  for (int rank = 0; rank < world_size(); ++rank) {
    const bool finished = ranks_[rank].finished;
    ranks_[rank] = RankStep();
    ranks_[rank].finished = finished;
  }
  orders_.EndEpoch();
  pairing_.EndEpoch();
  DropGivenBack();
  told_reducing_ = told_reduced_ = 0;
  if (nodes_ != nullptr) nodes_->EndStep();
  values_said_ = false;
  abandons_told_ = 0;
  written_gradients_.assign(plan_->params.size(), false);
  // Counted from the new epoch on: completions of older device work look at the epoch first.
  pending_reductions_ = 0;
  decision_.EndEpoch();
  passes_.EndEpoch();
  windows_.EndEpoch();
  snapshot_.GiveUpTaking();
  full_params_.EndEpoch();
  unshards_.EndEpoch();
}

void JobCore::Close(const std::string& why, CloseOn on) {
  if (closed_) {
    return;
  }
  Event(-1, "close", why);
  const auto extensions = extensions_.TakeAll();
  committed_.EndEpoch();
  closed_ = true;
  if (node_gathers_ != nullptr) node_gathers_->EndEpoch();
  for (int rank = 0; rank < world_size(); ++rank) {
    if (Session* session = sessions_[rank].get(); session != nullptr) {
      session->Poison(committed_.epoch());
      if (session->stream != nullptr) {
        v1::SessionEvent event;
        event.mutable_aborted()->set_epoch(committed_.epoch());
        event.mutable_aborted()->set_code(static_cast<int>(absl::StatusCode::kNotFound));
        event.mutable_aborted()->set_message(absl::StrCat("job \"", name(), "\" was closed: ", why));
        event.mutable_aborted()->set_committed_step(committed_.step());
        session->stream->Send(std::move(event));
        session->stream->Finish(absl::OkStatus());
      }
      EndSession(rank);
    }
  }
  if (nodes_ != nullptr) {
    if (RanksFinished() || on == CloseOn::kAllNodes || plan_->cut_over_nodes) {  // of that, a part is no job
      nodes_->member().Closing(why, plan_->cut_over_nodes ? finished() : RanksFinished());
    }
    nodes_->Stop();
    if (node_gathers_ != nullptr) node_gathers_->EndJob();
  }
  DropGivenBack();
  trace_.EndAll(why);
  Extensions::Answer(extensions, absl::AbortedError(absl::StrCat("job \"", name(), "\" was closed: ", why)));
}

}  // namespace shardd
