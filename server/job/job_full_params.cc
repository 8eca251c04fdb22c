// Full parameters: all ranks enter together, some of them read, perhaps write, and leave.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/plan/summon.h"
#include "common/shm/session_view.h"
#include "common/status/status_macros.h"
#include "server/job/job_core.h"

namespace shardd {

absl::Status JobCore::OnEnterFullParams(Session* session, const RankCommand& command) {
  const int rank = session->rank();
  FullParams asked;
  asked.writeback = (command.flags & kWriteback) != 0;
  asked.rank0_only = (command.flags & kRank0Only) != 0;
  asked.with_grads = (command.flags & kWithGrads) != 0;
  asked.recurse = (command.flags & kNotRecurse) == 0;
  asked.group = command.group;
  if (version_ == 0 || ranks_[rank].full_params) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, "EnterFullParams",
                     version_ == 0 ? "the job has no parameters yet" : "the rank is inside already");
  }
  const int groups = static_cast<int>(plan_->groups.size());
  if (asked.group < -1 || asked.group >= groups || (asked.group < 0 && !asked.recurse)) {
    return RankError(absl::StatusCode::kInvalidArgument, rank, "EnterFullParams",
                     asked.group == -1
                         ? "recurse false names no module; name a group"
                         : absl::StrCat("no such group (got ", asked.group, ", want -1 to ", groups - 1, ")"));
  }
  if (asked.with_grads && plan_->memory.gradients_bytes == 0) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, "EnterFullParams",
                     "with_grads: no parameter of the job is trained");
  }
  if (plan_->cut_over_nodes) {
    return RankError(absl::StatusCode::kUnimplemented, rank, "EnterFullParams",
                     "full parameters are not served where they are cut over nodes; read shards, or use "
                     "STRATEGY_HYBRID_SHARD");
  }
  if (asked.writeback && nodes_ != nullptr) {
    return RankError(absl::StatusCode::kUnimplemented, rank, "EnterFullParams",
                     "writeback is not served on several nodes; write values before version 1, into a new job");
  }
  SHARDD_RETURN_IF_ERROR(CheckNobodyFinished(rank, "EnterFullParams"));
  if (window_open_ || ranks_[rank].wants_window || ranks_[rank].pass != Pass::kOutside) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, "EnterFullParams",
                     "a pass or a write window is open; EnterPass and LeavePass first");
  }
  for (size_t g = 0; g < session->handles.size(); ++g) {
    SHARDD_RETURN_IF_ERROR(
        session->handles[g].Apply(HandleEvent::kEnterFullParams, group_name(static_cast<int>(g)), rank));
  }
  SHARDD_RETURN_IF_ERROR(CompareFullParams(rank, asked));
  ranks_[rank].full_params = true;
  ranks_[rank].done_at_entry = command.done;
  ranks_[rank].full = asked;
  ranks_[rank].writeback = asked.writeback;
  return MaybeGrantFullParams();
}

// Where there was memory for the old bytes when the job opened, processes beside the daemon may have it now; else other
// jobs may. REQUIRES: ranks have asked for the writeback, so it is among what is reserved.
absl::Status JobCore::CheckUndoFits() const {
  const int64_t undo_bytes = WritebackUndoBytes(*plan_);
  const bool promised = PromisedUndoBytes(*plan_, memory_->place()) == undo_bytes;
  const int64_t want_bytes = promised                      ? undo_bytes
                             : reserved_by_all_ == nullptr ? reserved_bytes()
                                                           : reserved_by_all_();
  SHARDD_ASSIGN_OR_RETURN(const MemoryLimits limits, GetMemoryLimits());
  const absl::Status status = CheckMemory(limits, want_bytes);
  if (status.ok()) {
    return absl::OkStatus();
  }
  return absl::Status(
      status.code(),
      absl::StrCat(status.message(), " (counted: ", undo_bytes, " bytes of the host for the undo of the writeback, ",
                   want_bytes - undo_bytes, " promised to jobs); without writeback it is served"));
}

absl::Status JobCore::CompareFullParams(int rank, const FullParams& asked) const {
  for (int other = 0; other < world_size(); ++other) {
    if (!ranks_[other].full_params || ranks_[other].inside) {
      continue;
    }
    const FullParams& before = ranks_[other].full;
    const struct {
      const char* name;
      int got;
      int want;
    } fields[] = {{"writeback", asked.writeback, before.writeback},
                  {"rank0_only", asked.rank0_only, before.rank0_only},
                  {"with_grads", asked.with_grads, before.with_grads},
                  {"recurse", asked.recurse, before.recurse},
                  {"group", asked.group, before.group}};
    for (const auto& field : fields) {
      if (field.got != field.want) {
        return RankError(absl::StatusCode::kFailedPrecondition, rank, "EnterFullParams",
                         absl::StrCat(field.name, " differs between ranks (got ", field.got, " on rank ", rank, ", ",
                                      field.want, " on rank ", other, ")"));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status JobCore::MaybeGrantFullParams() {
  const bool all =
      std::all_of(ranks_.begin(), ranks_.end(), [](const RankStep& r) { return r.full_params && !r.stepped; });
  if (!all || full_params_granted_ || committing_ || undoing_ || closed_ || entry_held_ || AwaitsNodes()) {
    return absl::OkStatus();
  }
  Held entry;  // inside, ranks write what others' GPUs may still read
  entry.order = Held::Order::kDecisions;
  entry.what = "EnterFullParams";
  for (int rank = 0; rank < world_size(); ++rank) {
    entry.signals.push_back(SignalOf(rank, ranks_[rank].done_at_entry));
  }
  if (!HaveCome(entry.signals)) {
    entry_held_ = true;
    entry.run = [this] {
      entry_held_ = false;
      return MaybeGrantFullParams();
    };
    return WhenGivenBack(std::move(entry));
  }
  if (ranks_[0].full.writeback) {
    if (absl::Status fits = CheckUndoFits(); !fits.ok()) {
      return RefuseFullParams(fits);
    }
  }
  if (!ranks_[0].full.with_grads) {
    GrantFullParams();
    return absl::OkStatus();
  }
  for (int rank = 0; rank < world_size(); ++rank) {
    SHARDD_RETURN_IF_ERROR(CheckBackwardClosed(rank, "EnterFullParams with_grads"));
    if (ranks_[rank].closed_backwards != ranks_[0].closed_backwards) {
      return RankError(absl::StatusCode::kFailedPrecondition, rank, "EnterFullParams",
                       absl::StrCat("with_grads: ranks have closed different numbers of backwards (got ",
                                    ranks_[rank].closed_backwards, " on rank ", rank, ", ", ranks_[0].closed_backwards,
                                    " on rank 0)"));
    }
  }
  if (collective_->may_hold_requests() && pending_reductions_ > 0) {
    return absl::OkStatus();  // no stream of ours need be in order with them; the last one asks again
  }
  // Behind all reductions, which are issued by now because every backward is closed everywhere.
  full_params_granted_ = true;
  Held settling;
  settling.order = Held::Order::kGradients;
  settling.what = "EnterFullParams with_grads";
  settling.run = [this] {
    SettleBehindReductions();
    return absl::OkStatus();
  };
  return WhenGivenBack(std::move(settling));
}

// All ranks are where they were before they asked.
absl::Status JobCore::RefuseFullParams(const absl::Status& why) {
  Event(-1, "full_params", absl::StrCat("refused: ", why.message()));
  for (int rank = 0; rank < world_size(); ++rank) {
    Session* session = sessions_[rank].get();
    for (size_t g = 0; g < session->handles.size(); ++g) {
      SHARDD_RETURN_IF_ERROR(
          session->handles[g].Apply(HandleEvent::kLeaveFullParams, group_name(static_cast<int>(g)), rank));
    }
    ranks_[rank].full_params = ranks_[rank].writeback = false;
    SayFullParams(rank, "", why);
  }
  MaybeOpenWindows();  // somebody may have waited for one meanwhile
  return absl::OkStatus();
}

// `present`: of gradients, empty where they were not asked for.
void JobCore::SayFullParams(int rank, const std::string& present, const absl::Status& status) {
  Session* session = sessions_[rank].get();
  if (session->stream != nullptr) {
    v1::SessionEvent event;
    event.mutable_full_params()->set_number(session->next_full_params());
    event.mutable_full_params()->set_present(present);
    event.mutable_full_params()->set_code(static_cast<int>(status.code()));
    event.mutable_full_params()->set_message(std::string(status.message()));
    session->stream->Send(std::move(event));
  }
  session->PublishFullParams();
}

void JobCore::SettleBehindReductions() {
  DeviceOps zeros = SettleAllPresence();
  auto reduced = JoinGradientWork(world_size(), [this, epoch = epoch_](absl::Status status) {
    if (epoch != epoch_ || closed_) {
      return;
    }
    if (!status.ok()) {
      Abort(std::move(status), {});
      return;
    }
    GrantFullParams();
  });
  for (int rank = 0; rank < world_size(); ++rank) {
    DeviceWork work;
    work.label = "full parameters with gradients";
    work.ops = std::move(zeros[rank]);
    work.done = reduced;
    devices_[rank]->Submit(StreamId::kPostBackward, std::move(work));
  }
}

void JobCore::GrantFullParams() {
  const FullParams& asked = ranks_[0].full;
  full_params_granted_ = true;
  summoned_ = SummonedParams(spec_, *plan_, asked.group, asked.recurse);
  std::string present(asked.with_grads ? MaskBytes(static_cast<int64_t>(present_.size())) : 0, '\0');
  for (size_t i = 0; i < present_.size() && asked.with_grads; ++i) {
    SetMaskBit(reinterpret_cast<uint8_t*>(present.data()), static_cast<int64_t>(i), present_[i]);
  }
  Event(-1, "full_params",
        absl::StrCat("entered", asked.group >= 0 ? absl::StrCat(" for \"", group_name(asked.group), "\"") : "",
                     asked.writeback ? " with writeback" : "", asked.with_grads ? " with gradients" : "",
                     asked.rank0_only ? " on rank 0 only" : ""));
  for (int rank = 0; rank < world_size(); ++rank) {
    ranks_[rank].inside = true;
    if (asked.with_grads || asked.writeback) {
      SayFullParams(rank, present, absl::OkStatus());
    } else {
      sessions_[rank]->PublishFullParams();
    }
  }
}

// Whether the rank may write the parameter, now that it is inside.
absl::Status JobCore::CheckSummoned(int rank, int param, absl::string_view what) const {
  if (!summoned_[param]) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, what,
                     absl::StrCat("not among the parameters of group \"", group_name(ranks_[rank].full.group),
                                  "\" that were entered"));
  }
  if (ranks_[rank].full.rank0_only && rank != 0) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, what, "rank 0 alone writes (rank0_only)");
  }
  return absl::OkStatus();
}

absl::Status JobCore::OnLeaveFullParams(Session* session, uint64_t done) {
  const int rank = session->rank();
  if (!ranks_[rank].inside) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, "LeaveFullParams", "the rank is not inside");
  }
  for (size_t g = 0; g < session->handles.size(); ++g) {
    SHARDD_RETURN_IF_ERROR(
        session->handles[g].Apply(HandleEvent::kLeaveFullParams, group_name(static_cast<int>(g)), rank));
  }
  if (committing_) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, "LeaveFullParams", "the commit is not finished");
  }
  ranks_[rank].full_params = false;
  ranks_[rank].inside = false;
  ranks_[rank].writeback = false;
  ranks_[rank].committed_params = false;
  ranks_[rank].done_at_leave = done;
  if (std::none_of(ranks_.begin(), ranks_.end(), [](const RankStep& r) { return r.inside; })) {
    full_params_granted_ = false;
    UndoWrites();  // writes that nobody committed
    if (closed_) {
      return absl::OkStatus();
    }
    SHARDD_RETURN_IF_ERROR(MaybeGrantFullParams());  // somebody may wait for the next time already
  }
  MaybeOpenWindows();  // or for a window
  return MaybeLetStore();
}

}  // namespace shardd
