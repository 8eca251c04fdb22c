// What an operator sees. Nothing here changes state.

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "server/job/job_core.h"

namespace shardd {
namespace {

int64_t UnixMillis(absl::Time time) { return absl::ToUnixMillis(time); }

}  // namespace

std::string JobCore::WaitText(int rank) const {
  if (const Session* session = sessions_[rank].get(); session != nullptr && session->held) {
    return absl::StrCat(devices_[rank]->name(), ": values are copied");
  }
  if (const std::string writers = snapshots_.AwaitedWriters(); sessions_[rank] == nullptr && !writers.empty()) {
    return absl::StrCat("the process of ", writers, ": attach, or its end");
  }
  const Wait wait = WaitingFor(rank);
  if (wait.rank < 0) {
    if (node_gathers_ != nullptr && unsharding_.AwaitsFill(rank)) {
      return node_gathers_->WaitText(MonotonicNow());
    }
    const bool waits = commits_.steps().stepped(rank) || gradients_.pairing().sleeps(rank) ||
                       gradients_.pairing().closed(rank) > 0 || values_.commit().asked(rank);
    return nodes_ != nullptr && waits ? nodes_->member().WaitText() : "";
  }
  return absl::StrCat("rank ", wait.rank, ": ", wait.call,
                      sessions_[wait.rank] != nullptr         ? ""
                      : absent_.WhyRefused(wait.rank).empty() ? " (it is not attached)"
                                                              : absl::StrCat(" (", absent_.WhyRefused(wait.rank), ")"));
}

v1::JobState JobCore::State() const {
  if (closed_) {
    return v1::JOB_STATE_CLOSED;
  }
  if (commits_.decision().committing()) {
    return v1::JOB_STATE_COMMITTING;
  }
  if (sessions_.attached() < world_size()) {
    return v1::JOB_STATE_WAITING;
  }
  if (summons_.full_params().granted()) {
    return v1::JOB_STATE_FULL_PARAMS;
  }
  for (const auto& session : sessions_) {
    for (const Handle& handle : session->handles) {
      if (handle.training() != TrainingState::kIdle) {
        return v1::JOB_STATE_FORWARD_BACKWARD;
      }
    }
  }
  return gradients_.pairing().empty() ? v1::JOB_STATE_IDLE : v1::JOB_STATE_FORWARD_BACKWARD;
}

JobDescription JobCore::Describe(v1::Job* out) {
  out->set_name(name());
  out->set_job_id(id_);
  out->set_uid(owner_.uid);
  out->set_has_secret(owner_.secret.has_value());
  out->set_world_size(world_size());
  out->set_state(State());
  out->set_epoch(committed_.epoch());
  out->set_committed_step(committed_step());
  out->set_version(committed_.version());
  out->set_attached_ranks(sessions_.attached());
  out->set_groups(static_cast<int>(plan_->groups.size()));
  out->set_slab_bytes(memory_->allocated_bytes());
  *out->mutable_counters() = counters_;
  out->set_collective(node_gathers_ == nullptr
                          ? collective_->Describe()
                          : absl::StrCat(collective_->Describe(), "; ", node_gathers_->Describe()));
  if (nodes_ != nullptr) {
    nodes_->member().Describe(out);
  }
  out->set_created_unix_ms(UnixMillis(created_));
  if (lost_.has_value()) {
    *out->mutable_lost() = *lost_;
  }
  out->set_plan_digest(absl::BytesToHexString(plan_->digest));
  return {plan_, committed_.ShareStepCounts()};
}

void JobCore::DescribeRanks(v1::ListRanksResponse* out) const {
  for (int rank = 0; rank < world_size(); ++rank) {
    v1::Rank* r = out->add_ranks();
    r->set_rank(rank);
    r->set_device(devices_[rank]->name());
    const Session* session = sessions_[rank].get();
    if (session == nullptr) {
      r->set_state(leavers_.finished(rank) ? v1::RANK_STATE_FINISHED : v1::RANK_STATE_ABSENT);
      r->set_waiting_for(WaitText(rank));
      continue;
    }
    v1::RankState state = v1::RANK_STATE_IDLE;
    for (size_t g = 0; g < session->handles.size(); ++g) {
      const Handle& handle = session->handles[g];
      v1::HandleStatus* h = r->add_handles();
      h->set_group(plan_->groups[g].name);
      h->set_storage_state(handle.storage() == StorageState::kUnsharded
                               ? absl::StrCat(StorageStateName(handle.storage()), "(", handle.users(), ")")
                               : std::string(StorageStateName(handle.storage())));
      h->set_training_state(std::string(TrainingStateName(handle.training())));
      if (handle.training() == TrainingState::kBackwardPre || handle.training() == TrainingState::kBackwardPost) {
        state = v1::RANK_STATE_BACKWARD;
      } else if (handle.training() == TrainingState::kForward && state == v1::RANK_STATE_IDLE) {
        state = v1::RANK_STATE_FORWARD;
      }
    }
    if (session->stream == nullptr) {
      state = v1::RANK_STATE_ATTACHING;
    } else if (commits_.steps().stepped(rank)) {
      state = v1::RANK_STATE_STEPPED;
    } else if (summons_.full_params().asked(rank)) {
      state = v1::RANK_STATE_FULL_PARAMS;
    }
    r->set_state(state);
    r->set_pid(session->peer.pid);
    r->set_session_id(session->id());
    r->set_commands(session->commands);
    r->set_last_command(session->last_command);
    r->set_last_command_age_ms(absl::ToInt64Milliseconds(MonotonicNow() - session->last_command_time));
    r->set_waiting_for(WaitText(rank));
    r->set_departures(session->departures);
    r->set_stream_ordered(session->ring().stream_ordered());
  }
}

}  // namespace shardd
