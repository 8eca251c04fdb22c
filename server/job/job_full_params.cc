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
  const FullParamsRequest request = ParseFullParams(command.flags, command.group);
  if (committed_.version() == 0 || full_params_.asked(rank)) {
    return committed_.RankError(
        absl::StatusCode::kFailedPrecondition, rank, "EnterFullParams",
        committed_.version() == 0 ? "the job has no parameters yet" : "the rank is inside already");
  }
  if (absl::Status served = CheckFullParams(*plan_, request, nodes_ != nullptr); !served.ok()) {
    return committed_.RankError(served.code(), rank, "EnterFullParams", served.message());
  }
  SHARDD_RETURN_IF_ERROR(extensions_.CheckAllTakePart(rank, "EnterFullParams"));
  if (writes_.hand_ins().any_since_version() || writes_.hand_ins().wants(rank) || !writes_.passes().outside(rank)) {
    return committed_.RankError(absl::StatusCode::kFailedPrecondition, rank, "EnterFullParams",
                                "a pass or a write window is open; EnterPass and LeavePass first");
  }
  for (size_t g = 0; g < session->handles.size(); ++g) {
    SHARDD_RETURN_IF_ERROR(
        session->handles[g].Apply(HandleEvent::kEnterFullParams, group_name(static_cast<int>(g)), rank));
  }
  if (absl::Status equal = full_params_.CheckEqual(rank, request); !equal.ok()) {
    return committed_.RankError(equal.code(), rank, "EnterFullParams", equal.message());
  }
  full_params_.Ask(rank, request, command.done);
  return absl::OkStatus();
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

bool JobCore::MayGrantFullParams() const {
  return !full_params_.granted() && !undo_.undoing() && !full_params_.awaits_devices() && !pairing_.AwaitsNodes();
}

absl::Status JobCore::CheckEqualBackwards() const {
  for (int rank = 0; full_params_.request(0).with_grads && rank < world_size(); ++rank) {
    SHARDD_RETURN_IF_ERROR(pairing_.CheckClosed(rank, "EnterFullParams with_grads"));
    if (pairing_.closed(rank) != pairing_.closed(0)) {
      return committed_.RankError(
          absl::StatusCode::kFailedPrecondition, rank, "EnterFullParams",
          absl::StrCat("with_grads: ranks have closed different numbers of backwards (got ", pairing_.closed(rank),
                       " on rank ", rank, ", ", pairing_.closed(0), " on rank 0)"));
    }
  }
  return absl::OkStatus();
}

// No stream of ours need be in order with them.
bool JobCore::SumsHoldFullParams() const {
  return full_params_.request(0).with_grads && pending_reductions_ > 0 && collective_->may_hold_requests();
}

absl::Status JobCore::LetIntoFullParams() {
  Held entry;  // inside, ranks write what others' GPUs may still read
  entry.order = Held::Order::kDecisions;
  entry.what = "EnterFullParams";
  for (int rank = 0; rank < world_size(); ++rank) {
    entry.signals.push_back(given_back_.SignalOf(rank, full_params_.entry_signal(rank)));
  }
  if (!given_back_.HaveCome(entry.signals)) {
    full_params_.AwaitDevices(true);
    entry.run = [this] {
      full_params_.AwaitDevices(false);
      return absl::OkStatus();
    };
    return given_back_.When(std::move(entry));
  }
  if (full_params_.request(0).writeback) {
    if (absl::Status fits = CheckUndoFits(); !fits.ok()) {
      return RefuseFullParams(fits);
    }
  }
  if (!full_params_.request(0).with_grads) {
    GrantFullParams();
    return absl::OkStatus();
  }
  // Behind all reductions, which are issued by now because every backward is closed everywhere.
  full_params_.BeginGrant();
  Held settling;
  settling.order = Held::Order::kGradients;
  settling.what = "EnterFullParams with_grads";
  settling.run = [this] {
    SettleBehindReductions();
    return absl::OkStatus();
  };
  return given_back_.When(std::move(settling));
}

// All ranks are where they were before they asked.
absl::Status JobCore::RefuseFullParams(const absl::Status& why) {
  events_.Add(-1, "full_params", absl::StrCat("refused: ", why.message()));
  for (int rank = 0; rank < world_size(); ++rank) {
    Session* session = sessions_[rank].get();
    for (size_t g = 0; g < session->handles.size(); ++g) {
      SHARDD_RETURN_IF_ERROR(
          session->handles[g].Apply(HandleEvent::kLeaveFullParams, group_name(static_cast<int>(g)), rank));
    }
    SayFullParams(rank, "", why);
  }
  full_params_.Refuse();
  return absl::OkStatus();
}

// `present`: of gradients, empty where they were not asked for.
void JobCore::SayFullParams(int rank, const std::string& present, const absl::Status& status) {
  Session* session = sessions_[rank].get();
  if (session->stream != nullptr) {
    v1::SessionEvent event;
    event.mutable_full_params()->set_number(session->words().next_full_params());
    event.mutable_full_params()->set_present(present);
    event.mutable_full_params()->set_code(static_cast<int>(status.code()));
    event.mutable_full_params()->set_message(std::string(status.message()));
    session->stream->Send(std::move(event));
  }
  session->words().PublishFullParams();
}

void JobCore::SettleBehindReductions() {
  DeviceOps zeros = SettleAllPresence();
  auto reduced = JoinGradientWork(world_size(), [this, epoch = committed_.epoch()](absl::Status status) {
    if (epoch != committed_.epoch() || closed_) {
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
  const FullParamsRequest& asked = full_params_.request(0);
  full_params_.Grant(SummonedParams(spec_, *plan_, asked.group, asked.recurse));
  std::string present(asked.with_grads ? MaskBytes(static_cast<int64_t>(pairing_.presence().by_param().size())) : 0,
                      '\0');
  for (size_t i = 0; i < pairing_.presence().by_param().size() && asked.with_grads; ++i) {
    SetMaskBit(reinterpret_cast<uint8_t*>(present.data()), static_cast<int64_t>(i), pairing_.presence().by_param()[i]);
  }
  events_.Add(-1, "full_params",
              absl::StrCat("entered", asked.group >= 0 ? absl::StrCat(" for \"", group_name(asked.group), "\"") : "",
                           asked.writeback ? " with writeback" : "", asked.with_grads ? " with gradients" : "",
                           asked.rank0_only ? " on rank 0 only" : ""));
  for (int rank = 0; rank < world_size(); ++rank) {
    if (asked.with_grads || asked.writeback) {
      SayFullParams(rank, present, absl::OkStatus());
    } else {
      sessions_[rank]->words().PublishFullParams();
    }
  }
}

absl::Status JobCore::OnLeaveFullParams(Session* session, uint64_t done) {
  const int rank = session->rank();
  if (!full_params_.inside(rank)) {
    return committed_.RankError(absl::StatusCode::kFailedPrecondition, rank, "LeaveFullParams",
                                "the rank is not inside");
  }
  for (size_t g = 0; g < session->handles.size(); ++g) {
    SHARDD_RETURN_IF_ERROR(
        session->handles[g].Apply(HandleEvent::kLeaveFullParams, group_name(static_cast<int>(g)), rank));
  }
  if (decision_.committing()) {
    return committed_.RankError(absl::StatusCode::kFailedPrecondition, rank, "LeaveFullParams",
                                "the commit is not finished");
  }
  value_commit_.Forget(rank);
  if (full_params_.Leave(rank, done)) {
    UndoWrites();  // writes that nobody committed
  }
  return absl::OkStatus();
}

}  // namespace shardd
