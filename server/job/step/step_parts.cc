// Parts of a step, of several optimizers of one model (v1::Step.part).

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/device/ops/rest_of_update.h"
#include "server/job/membership/sessions.h"
#include "server/job/step/commits.h"
#include "server/job/step/committed.h"
#include "server/job/work/job_work.h"
#include "server/job/writes/parameter_parts.h"
#include "server/job/writes/trainer_writes.h"
#include "server/job/writes/value_writes.h"
#include "server/optimizer/optimizer.h"
#include "server/session/session.h"
#include "server/session/session_stream.h"
#include "server/storage/job_memory.h"
#include "server/storage/job_slab.h"
#include "server/storage/undo_slab.h"

namespace shardd {

absl::Status Commits::CheckMayStepInParts() const {
  const JobMemory& memory = *see_.memory;
  const bool on_gpus = memory.place().memory != nullptr;
  if (on_gpus || see_.plan->config.pass_copies() || memory.undo() == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("several optimizers of one model step in parts, which are not served ",
                     on_gpus                           ? "on GPUs"
                     : see_.plan->config.pass_copies() ? "where passes read copies (got pass_copies true, want false)"
                                                       : "without memory for old bytes",
                     "; use one optimizer with several param groups, or let them step in the trainers"));
  }
  if (use_.writes->hand_ins().any_since_version()) {
    return absl::FailedPreconditionError(
        "parameters were edited between the forward and the step of one of several optimizers; edit them before the "
        "forward, or let the optimizers step in the trainers");
  }
  return absl::OkStatus();
}

absl::Status Commits::CheckBetweenParts(int rank, Opcode opcode) const {
  // A rank that has sent its next part and has not waited for it is between parts, too.
  const bool between = steps_.stepped(rank) ? steps_.step(rank).part() : decision_.parts() > 0;
  if (!between || opcode == Opcode::kStep || opcode == Opcode::kReshard || opcode == Opcode::kSetGradientPresence ||
      opcode == Opcode::kLeavePass || opcode == Opcode::kWaitGradientSlot || opcode == Opcode::kAbandonBackward) {
    return absl::OkStatus();
  }
  return use_.committed->RankError(
      absl::StatusCode::kFailedPrecondition, rank, OpcodeName(opcode),
      absl::StrCat(
          opcode == Opcode::kHandIn ? "parameters were edited between the steps of two optimizers of one model"
                                    : "the step goes on",
          " (", decision_.parts(), " parts of it are made, and it is not committed); ",
          opcode == Opcode::kHandIn
              ? "edit them behind the last one, or run a forward before the next one, which commits the step, or "
                "let the optimizers step in the trainers"
              : "send Step without `part` first"));
}

// Of a step over nodes that was promised behind them: node 0 says whether they are committed with it or put back.
void Commits::TakeUpParts(const v1::PromisedStepRecord& promised) {
  const std::vector<int64_t>& before = use_.committed->step_counts();
  for (size_t param = 0; param < before.size(); ++param) {
    if (before[param] != promised.step_counts(static_cast<int>(param))) {
      use_.values->undo().SaveCount(static_cast<int>(param), before[param]);
    }
  }
  use_.committed->SetStepCounts({promised.step_counts().begin(), promised.step_counts().end()});
  use_.values->undo().WillSave(use_.committed->version());
  decision_.TakeUpParts(promised.parts());
}

// No other bytes are changed by a part than those of the update's operations.
void Commits::SaveThenUpdate() {
  UndoSlab* const undo = see_.memory->undo();
  const uint64_t version = use_.committed->version();
  DeviceOps copies(world_size());
  const std::pair<const JobSlab*, const char*> slabs[] = {
      {see_.memory->shards(), see_.memory->pointers().shards},
      {see_.memory->optimizer(), see_.memory->pointers().optimizer}};
  for (int rank = 0; rank < world_size(); ++rank) {
    const std::vector<DeviceOp> ops = UpdateOps(*see_.plan, see_.memory->pointers(), decision_.step(), rank, {});
    std::vector<CopyOp> of_rank;
    for (const auto& [slab, begin] : slabs) {  // one after the other, so that neighbours are copied together
      for (const DeviceOp& op : ops) {
        for (const UpdateLog::Array& array : WrittenBy(op)) {
          const int64_t offset = slab == nullptr ? -1 : static_cast<const char*>(array.data) - begin;
          if (array.size_bytes == 0 || offset < 0 || offset >= slab->size_bytes()) continue;
          if (absl::Status saved = undo->BeginSave(slab, offset, array.size_bytes, version, &of_rank); !saved.ok()) {
            GiveUp("keep what a part of a step changes", saved);
            return;
          }
        }
      }
    }
    for (const CopyOp& copy : of_rank) copies[static_cast<size_t>(rank)].emplace_back(copy);
  }
  use_.values->undo().WillSave(version);
  const uint64_t epoch = use_.committed->epoch();
  auto done = use_.work->Join(see_.devices->count(), [this, undo, version, epoch](const absl::Status& status) {
    if (epoch != use_.committed->epoch()) {
      return;  // the job was closed
    }
    if (!status.ok()) {
      GiveUp("keep what a part of a step changes", status);
      return;
    }
    undo->EndSave(version);
    Update();
  });
  see_.devices->Submit(absl::StrCat("keep for a part of step ", use_.committed->step() + 1),
                       see_.devices->Divide(std::move(copies), /*in_order=*/false), done);
}

void Commits::CommitPart() {
  const DecidedStep& step = decision_.step();
  for (size_t p = 0; p < step.present.size(); ++p) {
    const int param = static_cast<int>(p);
    if (step.present[p]) {
      use_.values->undo().SaveCount(param, step.step_counts[p]);
      use_.committed->SetStepCount(param, step.step_counts[p] + 1);
      use_.counters->set_bytes_updated(use_.counters->bytes_updated() + ElementsOfNode(*see_.plan, param).numel *
                                                                            DTypeSizeBytes(see_.plan->params[p].dtype));
    }
    if (!Leaves(steps_.step(0), see_.plan->params[p].optimizer_group)) use_.gradients->presence().Set(param, false);
  }
  (void)steps_.TakeTrainerStates();
  use_.gradients->StepCommitted();
  if (nodes_.part_made != nullptr) nodes_.part_made();
  decision_.PartMade();
  v1::SessionEvent event;
  event.mutable_committed()->set_step(use_.committed->step());
  decision_.Describe(event.mutable_committed());
  event.mutable_committed()->set_version(use_.committed->version());
  for (const auto& session : *see_.sessions) {
    if (session == nullptr) continue;
    // No version is published: its wait was for the daemon, as a whole step's is until PublishVersion.
    session->words().NoteProgress();
    session->words().EndStepBackwards();
    if (session->stream != nullptr) session->stream->Send(event);
  }
}

}  // namespace shardd
