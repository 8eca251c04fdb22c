#include "server/job/job_view.h"

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/clock/monotonic_now.h"
#include "server/device/device.h"
#include "server/job/epoch_end.h"
#include "server/job/full_params/summons.h"
#include "server/job/gradients/pairing.h"
#include "server/job/gradients/reductions.h"
#include "server/job/membership/absent_ranks.h"
#include "server/job/membership/sessions.h"
#include "server/job/meter/job_meter.h"
#include "server/job/nodes/job_nodes.h"
#include "server/job/step/asked_steps.h"
#include "server/job/step/committed.h"
#include "server/job/step/step_decision.h"
#include "server/job/unshard/node_gathers.h"
#include "server/job/unshard/unsharding.h"
#include "server/job/writes/snapshot_keeper.h"
#include "server/job/writes/trainer_writes.h"
#include "server/job/writes/value_writes.h"
#include "server/observe/duration_histogram.h"
#include "server/session/session.h"
#include "server/storage/job_memory.h"

namespace shardd {
namespace {

bool IsTraining(const Handle& handle) { return handle.training() != TrainingState::kIdle; }

// Some rank is in the forward or backward of a group.
bool AnyTrains(const Sessions& sessions) {
  return std::any_of(sessions.begin(), sessions.end(), [](const auto& session) {
    return session != nullptr && std::any_of(session->handles.begin(), session->handles.end(), IsTraining);
  });
}

}  // namespace

std::string JobView::WaitText(int rank) const {
  const Session* session = (*see_.sessions)[rank].get();
  if (session != nullptr && session->held) {
    return absl::StrCat((*see_.devices)[static_cast<size_t>(rank)]->name(), ": values are copied");
  }
  if (const std::string writers = see_.snapshots->AwaitedWriters(); session == nullptr && !writers.empty()) {
    return absl::StrCat("the process of ", writers, ": attach, or its end");
  }
  const Wait wait = see_.waiting_for(rank);
  if (wait.rank < 0) {
    if (see_.nodes->gathers() != nullptr && see_.unsharding->AwaitsFill(rank)) {
      return see_.nodes->gathers()->WaitText(MonotonicNow());
    }
    const FullParams& full_params = see_.summons->full_params();
    const bool waits = see_.steps->stepped(rank) || see_.pairing->sleeps(rank) || see_.pairing->closed(rank) > 0 ||
                       see_.values->commit().asked(rank) || see_.writes->passes().entering(rank) ||
                       (full_params.asked(rank) && !full_params.inside(rank));
    return waits ? see_.nodes->WaitText() : "";
  }
  const std::string refused = see_.absent->WhyRefused(wait.rank);
  return absl::StrCat("rank ", wait.rank, ": ", wait.call,
                      (*see_.sessions)[wait.rank] != nullptr ? ""
                      : refused.empty()                      ? " (it is not attached)"
                                                             : absl::StrCat(" (", refused, ")"));
}

v1::JobState JobView::State() const {
  if (see_.end->closed()) {
    return v1::JOB_STATE_CLOSED;
  }
  if (see_.decision->committing()) {
    return v1::JOB_STATE_COMMITTING;
  }
  if (see_.sessions->attached() < world_size()) {
    return v1::JOB_STATE_WAITING;
  }
  if (see_.summons->full_params().granted()) {
    return v1::JOB_STATE_FULL_PARAMS;
  }
  return see_.pairing->empty() && !AnyTrains(*see_.sessions) ? v1::JOB_STATE_IDLE : v1::JOB_STATE_FORWARD_BACKWARD;
}

JobDescription JobView::Describe(v1::Job* out) const {
  const JobIdentity& identity = *see_.identity;
  out->set_name(identity.name());
  out->set_job_id(identity.id);
  out->set_uid(identity.owner.uid);
  out->set_has_secret(identity.owner.secret.has_value());
  out->set_outlives_daemon(see_.committed->outlives_daemon());
  if (see_.committed->outlives_daemon()) *out->mutable_kept_formats() = identity.kept_formats;
  out->set_world_size(world_size());
  out->set_state(State());
  out->set_epoch(see_.committed->epoch());
  out->set_committed_step(committed_step());
  out->set_version(see_.committed->version());
  out->set_attached_ranks(see_.sessions->attached());
  out->set_groups(static_cast<int>(see_.identity->plan->groups.size()));
  out->set_slab_bytes(see_.memory->allocated_bytes());
  *out->mutable_counters() = *see_.counters;
  out->set_collective(see_.collective->Describe());
  see_.nodes->Describe(out);
  out->set_created_unix_ms(absl::ToUnixMillis(identity.created));
  if (identity.lost.has_value()) {
    *out->mutable_lost() = *identity.lost;
  }
  out->set_plan_digest(absl::BytesToHexString(see_.identity->plan->digest));
  return {see_.identity->plan, see_.committed->ShareStepCounts()};
}

void JobView::DescribeRanks(v1::ListRanksResponse* out) const {
  for (int rank = 0; rank < world_size(); ++rank) {
    v1::Rank* described = out->add_ranks();
    described->set_rank(rank);
    described->set_device((*see_.devices)[static_cast<size_t>(rank)]->name());
    described->set_waiting_for(WaitText(rank));
    if (const Session* session = (*see_.sessions)[rank].get(); session != nullptr) {
      DescribeSession(*session, described);
    }
    described->set_state(StateOf(rank));
  }
}

v1::RankState JobView::StateOf(int rank) const {
  const Session* session = (*see_.sessions)[rank].get();
  if (session == nullptr) return see_.leavers->finished(rank) ? v1::RANK_STATE_FINISHED : v1::RANK_STATE_ABSENT;
  if (session->stream == nullptr) return v1::RANK_STATE_ATTACHING;
  if (see_.steps->stepped(rank)) return v1::RANK_STATE_STEPPED;
  if (see_.summons->full_params().asked(rank)) return v1::RANK_STATE_FULL_PARAMS;
  v1::RankState state = v1::RANK_STATE_IDLE;
  for (const Handle& handle : session->handles) {
    const TrainingState training = handle.training();
    if (training == TrainingState::kBackwardPre || training == TrainingState::kBackwardPost) {
      return v1::RANK_STATE_BACKWARD;
    }
    if (training == TrainingState::kForward) state = v1::RANK_STATE_FORWARD;
  }
  return state;
}

void JobView::DescribeMetrics(v1::JobMetrics* out) const {
  out->set_name(see_.identity->name());
  out->set_uid(see_.identity->owner.uid);
  out->set_world_size(world_size());
  out->set_state(State());
  out->set_epoch(see_.committed->epoch());
  out->set_committed_step(committed_step());
  *out->mutable_counters() = *see_.counters;
  v1::Job described;  // the nodes, as ListJobs says them
  see_.nodes->Describe(&described);
  out->mutable_nodes()->Swap(described.mutable_nodes());
  const std::string collective = see_.collective->Describe();
  out->set_collective(collective.substr(0, collective.find_first_of(" :;")));
  const absl::Time now = MonotonicNow();
  for (int rank = 0; rank < world_size(); ++rank) {
    v1::RankMetrics* const described_rank = out->add_ranks();
    described_rank->set_state(StateOf(rank));
    const Session* session = (*see_.sessions)[rank].get();
    described_rank->set_last_heard_ns(
        session == nullptr ? -1
                           : absl::ToInt64Nanoseconds(
                                 now - std::max(session->last_command_time, session->words().last_progress_time())));
  }
  see_.meter->Describe(out);
  shardd::Describe(see_.reductions->durations(), out->mutable_reductions());
}

void JobView::DescribeSession(const Session& session, v1::Rank* out) const {
  for (size_t group = 0; group < session.handles.size(); ++group) {
    const Handle& handle = session.handles[group];
    v1::HandleStatus* described = out->add_handles();
    described->set_group(see_.identity->plan->groups[group].name);
    described->set_storage_state(handle.storage() == StorageState::kUnsharded
                                     ? absl::StrCat(StorageStateName(handle.storage()), "(", handle.users(), ")")
                                     : std::string(StorageStateName(handle.storage())));
    described->set_training_state(std::string(TrainingStateName(handle.training())));
  }
  out->set_pid(session.peer.pid);
  out->set_session_id(session.id());
  out->set_protocol_version(session.protocol_version());
  out->set_commands(session.commands);
  out->set_last_command(session.last_command());
  out->set_last_command_age_ms(absl::ToInt64Milliseconds(MonotonicNow() - session.last_command_time));
  out->set_departures(session.departures);
  out->set_stream_ordered(session.ring().stream_ordered());
}

bool JobView::IsMidStep() const {
  for (int rank = 0; rank < world_size(); ++rank) {
    if (!see_.writes->passes().outside(rank)) return true;
  }
  return IsBeyondPass();
}

bool JobView::IsBeyondPass() const {
  for (int rank = 0; rank < world_size(); ++rank) {
    if (see_.writes->hand_ins().open(rank) || see_.pairing->closed(rank) > 0) return true;
  }
  return see_.decision->parts() > 0 || see_.pairing->any_seen() || see_.writes->hand_ins().any_since_version() ||
         see_.values->any_initial() || see_.summons->full_params().AnyAsked() || see_.steps->any_stepped() ||
         see_.values->commit().any_asked() || AnyTrains(*see_.sessions);
}

int64_t JobView::committed_step() const { return std::min(see_.committed->step(), see_.nodes->held_step()); }

bool JobView::has_parameters() const {
  return see_.committed->version() > 0 || (see_.committed->had_parameters() && see_.nodes->fetching());
}

absl::Status JobView::CheckStillHas(const Session& session) const {
  if (session.expected_version == 0 || see_.committed->version() > 0) {
    return absl::OkStatus();
  }
  const std::string what = absl::StrCat("reattach rank ", session.rank(), " of job \"", see_.identity->name(), "\": ");
  if (see_.nodes->MayBeSentState()) {
    return absl::AbortedError(absl::StrCat(
        what, "this daemon, a new one, has not heard yet whether another node has its state; attach again"));
  }
  return absl::NotFoundError(absl::StrCat(
      what, "its parameters are lost (got version 0, want ", session.expected_version,
      " or later): the daemon was restarted, or has freed the job after its grace time; start the program anew, which "
      "begins from the values that it gives (a checkpoint's)"));
}

}  // namespace shardd
