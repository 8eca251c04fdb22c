#include "server/job/full_params/summons.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/plan/summon.h"
#include "common/shm/session_view.h"
#include "common/status/status_macros.h"
#include "server/device/device.h"
#include "server/device/device_op.h"
#include "server/job/gradients/pairing.h"
#include "server/job/job_events.h"
#include "server/job/membership/extensions.h"
#include "server/job/membership/leavers.h"
#include "server/job/membership/sessions.h"
#include "server/job/step/committed.h"
#include "server/job/step/step_decision.h"
#include "server/job/work/given_back.h"
#include "server/job/work/job_work.h"
#include "server/job/writes/hand_ins.h"
#include "server/job/writes/trainer_writes.h"
#include "server/job/writes/write_undo.h"
#include "server/session/rank_command.h"
#include "server/session/session.h"
#include "server/session/session_stream.h"

namespace shardd {

absl::Status Summons::Enter(Session* session, const RankCommand& command) {
  const int rank = session->rank();
  const FullParamsRequest request = ParseFullParams(command.flags, command.group);
  if (see_.committed->version() == 0 || full_params_.asked(rank)) {
    return Error(rank, "EnterFullParams",
                 see_.committed->version() == 0 ? "the job has no parameters yet" : "the rank is inside already");
  }
  if (absl::Status served = CheckFullParams(*see_.plan, request, see_.over_nodes); !served.ok()) {
    return see_.committed->RankError(served.code(), rank, "EnterFullParams", served.message());
  }
  SHARDD_RETURN_IF_ERROR(request.OnlyReads() ? see_.extensions->CheckNobodyAsks(rank, "EnterFullParams")
                                             : see_.extensions->CheckAllTakePart(rank, "EnterFullParams"));
  const HandIns& hand_ins = see_.writes->hand_ins();
  if (hand_ins.any_since_version() || hand_ins.wants(rank) || !see_.writes->passes().outside(rank)) {
    return Error(rank, "EnterFullParams", "the rank is inside a pass, or hands in; EnterPass and LeavePass first");
  }
  SHARDD_RETURN_IF_ERROR(Apply(session, HandleEvent::kEnterFullParams));
  if (absl::Status equal = full_params_.CheckEqual(rank, request); !equal.ok()) {
    return see_.committed->RankError(equal.code(), rank, "EnterFullParams", equal.message());
  }
  full_params_.Ask(rank, request, command.done);
  return absl::OkStatus();
}

absl::Status Summons::Apply(Session* session, HandleEvent event) const {
  for (size_t g = 0; g < session->handles.size(); ++g) {
    SHARDD_RETURN_IF_ERROR(session->handles[g].Apply(event, group_name(static_cast<int>(g)), session->rank()));
  }
  return absl::OkStatus();
}

bool Summons::IsReady(int rank) const {
  const FullParamsRequest* const agreed = full_params_.agreed();
  return full_params_.asked(rank) || (see_.leavers->finished(rank) && agreed != nullptr && agreed->OnlyReads());
}

bool Summons::MayGrant() const {
  return full_params_.AnyAsked() && !full_params_.granted() && !see_.undo->undoing() &&
         !full_params_.awaits_devices() && !see_.pairing->AwaitsNodes();
}

absl::Status Summons::CheckEqualBackwards() const {
  for (int rank = 0; full_params_.agreed()->with_grads && rank < world_size(); ++rank) {
    SHARDD_RETURN_IF_ERROR(see_.pairing->CheckClosed(rank, "EnterFullParams with_grads"));
    if (see_.pairing->closed(rank) != see_.pairing->closed(0)) {
      return see_.committed->RankError(
          absl::StatusCode::kFailedPrecondition, rank, "EnterFullParams",
          absl::StrCat("with_grads: ranks have closed different numbers of backwards (got ", see_.pairing->closed(rank),
                       " on rank ", rank, ", ", see_.pairing->closed(0), " on rank 0)"));
    }
  }
  return absl::OkStatus();
}

absl::Status Summons::LetIn() {
  Held entry;  // inside, ranks write what others' GPUs may still read
  entry.order = Held::Order::kDecisions;
  entry.what = "EnterFullParams";
  for (int rank = 0; rank < world_size(); ++rank) {
    entry.signals.push_back(use_.given_back->SignalOf(rank, full_params_.entry_signal(rank)));
  }
  if (!use_.given_back->HaveCome(entry.signals)) {
    full_params_.AwaitDevices(true);
    entry.run = [this] {
      full_params_.AwaitDevices(false);
      return absl::OkStatus();
    };
    return use_.given_back->When(std::move(entry));
  }
  if (full_params_.agreed()->writeback) {
    if (absl::Status fits = CheckUndoFits(); !fits.ok()) {
      return see_.over_nodes ? fits : Refuse(fits);
    }
  }
  if (!full_params_.agreed()->with_grads) {
    Grant();
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
  return use_.given_back->When(std::move(settling));
}

absl::Status Summons::CheckUndoFits() const {
  const absl::Status fits = use_.check_undo_fits();
  return fits.ok() ? fits : absl::Status(fits.code(), absl::StrCat("EnterFullParams with writeback: ", fits.message()));
}

absl::Status Summons::Refuse(const absl::Status& why) {
  use_.events->Add(-1, "full_params", absl::StrCat("refused: ", why.message()));
  for (int rank = 0; rank < world_size(); ++rank) {
    Session* session = (*see_.sessions)[rank].get();
    SHARDD_RETURN_IF_ERROR(Apply(session, HandleEvent::kLeaveFullParams));
    Say(rank, "", why);
  }
  full_params_.Refuse();
  return absl::OkStatus();
}

void Summons::Say(int rank, const std::string& present, const absl::Status& status) {
  Session* session = (*see_.sessions)[rank].get();
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

void Summons::SettleBehindReductions() {
  DeviceOps zeros = use_.settle_gradients();
  auto reduced =
      use_.work->JoinGradientWork(world_size(), [this, epoch = see_.committed->epoch()](absl::Status status) {
        if (epoch != see_.committed->epoch()) {  // as also where the job was closed
          return;
        }
        if (!status.ok()) {
          use_.job->Fail(std::move(status));
          return;
        }
        Grant();
      });
  for (int rank = 0; rank < world_size(); ++rank) {
    DeviceWork work;
    work.label = "full parameters with gradients";
    work.ops = std::move(zeros[rank]);
    work.done = reduced;
    (*use_.devices)[rank]->Submit(StreamId::kPostBackward, std::move(work));
  }
}

void Summons::Grant() {
  const FullParamsRequest& asked = *full_params_.agreed();
  full_params_.Grant(SummonedParams(*see_.spec, *see_.plan, asked.group, asked.recurse));
  std::string present(
      asked.with_grads ? MaskBytes(static_cast<int64_t>(see_.pairing->presence().by_param().size())) : 0, '\0');
  for (size_t i = 0; i < see_.pairing->presence().by_param().size() && asked.with_grads; ++i) {
    SetMaskBit(reinterpret_cast<uint8_t*>(present.data()), static_cast<int64_t>(i),
               see_.pairing->presence().by_param()[i]);
  }
  use_.events->Add(
      -1, "full_params",
      absl::StrCat("entered", asked.group >= 0 ? absl::StrCat(" for \"", group_name(asked.group), "\"") : "",
                   asked.writeback ? " with writeback" : "", asked.with_grads ? " with gradients" : "",
                   asked.rank0_only ? " on rank 0 only" : ""));
  for (int rank = 0; rank < world_size(); ++rank) {
    if (!asked.OnlyReads()) {
      Say(rank, present, absl::OkStatus());
    } else if (full_params_.inside(rank)) {
      (*see_.sessions)[rank]->words().PublishFullParams();
    }
  }
}

absl::Status Summons::Leave(Session* session, uint64_t done, bool* last) {
  const int rank = session->rank();
  if (!full_params_.inside(rank)) {
    return Error(rank, "LeaveFullParams", "the rank is not inside");
  }
  SHARDD_RETURN_IF_ERROR(Apply(session, HandleEvent::kLeaveFullParams));
  if (see_.decision->committing()) {
    return Error(rank, "LeaveFullParams", "the commit is not finished");
  }
  *last = full_params_.Leave(rank, done);
  return absl::OkStatus();
}

Wait Summons::WaitingFor(int rank) const {
  if (!full_params_.asked(rank) || full_params_.inside(rank)) {
    return {};
  }
  Wait wait = FirstOther(world_size(), rank, "EnterFullParams", [this](int other) { return !IsReady(other); });
  return wait.rank >= 0 ? wait : FirstOther(world_size(), rank, "LeaveFullParams", [this](int other) {
    return full_params_.inside(other);
  });
}

absl::Status Summons::Error(int rank, absl::string_view what, absl::string_view fact) const {
  return see_.committed->RankError(absl::StatusCode::kFailedPrecondition, rank, what, fact);
}

}  // namespace shardd
