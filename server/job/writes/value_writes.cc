#include "server/job/writes/value_writes.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/full_params/full_params.h"
#include "server/job/full_params/summons.h"
#include "server/job/job_events.h"
#include "server/job/membership/extensions.h"
#include "server/job/membership/sessions.h"
#include "server/job/step/commits.h"
#include "server/job/step/committed.h"
#include "server/job/work/job_work.h"
#include "server/job/writes/snapshot_keeper.h"
#include "server/job/writes/write_request.h"
#include "server/optimizer/optimizer.h"
#include "server/session/rank_command.h"
#include "server/session/session.h"
#include "server/storage/job_memory.h"
#include "server/storage/job_slab.h"
#include "server/storage/undo_slab.h"
#include "server/turns/turn_queue.h"

namespace shardd {
namespace {

constexpr char kCommit[] = "commit of parameters";

}  // namespace

ValueWrites::ValueWrites(Facts facts, Services services, TurnQueue* copier, WorkOwner owner)
    : see_(facts),
      use_(std::move(services)),
      commit_(facts.plan->world_size),
      copies_(use_.work->loop(), copier, owner),
      written_gradients_(facts.plan->params.size(), false),
      written_parts_(facts.plan->params.size(), 0) {}

void ValueWrites::TakeUp(const v1::PromisedValuesRecord& promised) {
  const std::vector<int64_t>& before = use_.counts->step_counts();
  for (size_t param = 0; param < before.size(); ++param) {
    if (before[param] != promised.step_counts(static_cast<int>(param))) {
      undo_.SaveCount(static_cast<int>(param), before[param]);
    }
  }
  use_.counts->SetStepCounts({promised.step_counts().begin(), promised.step_counts().end()});
  if (use_.memory->undo() != nullptr) undo_.WillSave(use_.counts->version());
  promised_states_.assign(promised.trainer_states().begin(), promised.trainer_states().end());
}

bool ValueWrites::WritesBack(int rank) const {
  const FullParams& full_params = see_.summons->full_params();
  return full_params.inside(rank) && full_params.writes(rank);
}

absl::Status ValueWrites::CheckMayWrite(int rank, const RankCommand& command, const std::string& what,
                                        bool writeback) const {
  if (see_.decision->committing() || (use_.counts->version() != 0 && !writeback)) {
    return Error(absl::StatusCode::kFailedPrecondition, rank, what,
                 "parameters may be written before version 1 and between EnterFullParams(writeback) and "
                 "CommitParameters");
  }
  if (commit_.asked(rank)) {
    return Error(absl::StatusCode::kFailedPrecondition, rank, what, "the rank has already sent CommitParameters");
  }
  if (writeback) {
    if (absl::Status may = see_.summons->full_params().CheckMayWrite(*see_.plan, rank, command.group); !may.ok()) {
      return Error(may.code(), rank, what, may.message());
    }
  }
  return absl::OkStatus();
}

absl::Status ValueWrites::Write(Session* session, const RankCommand& command) {
  const int rank = session->rank();
  const bool writeback = WritesBack(rank);
  if (command.group < 0 || command.group >= static_cast<int>(see_.plan->params.size())) {
    return Error(
        absl::StatusCode::kInvalidArgument, rank, "WriteParameters",
        absl::StrCat("no such parameter (got ", command.group, ", want 0 to ", see_.plan->params.size() - 1, ")"));
  }
  const ParamPlan& param = see_.plan->params[command.group];
  const std::string what = absl::StrCat("WriteParameters \"", param.fqn, "\"");
  SHARDD_RETURN_IF_ERROR(CheckMayWrite(rank, command, what, writeback));
  const absl::StatusOr<WriteRequest> request =
      ParseWrite(*see_.plan, command, /*gradients=*/writeback && see_.summons->full_params().request(rank).with_grads);
  if (!request.ok()) {
    return Error(request.status().code(), rank, what, request.status().message());
  }
  if (request->target == WriteRequest::Target::kUpdateCount) {
    undo_.SaveCount(request->param, use_.counts->step_counts()[request->param]);
    use_.counts->SetStepCount(request->param, request->count);
    return absl::OkStatus();
  }
  SHARDD_ASSIGN_OR_RETURN(Source source, SourceOf(session, command, *request, what));
  return request->target == WriteRequest::Target::kGradient ? WriteGradient(session, *request, std::move(source))
                                                            : WritePart(session, *request, std::move(source));
}

absl::StatusOr<ValueWrites::Source> ValueWrites::SourceOf(Session* session, const RankCommand& command,
                                                          const WriteRequest& request, const std::string& what) const {
  const int64_t want_bytes = request.size_bytes();
  if (command.values != nullptr || session->words().told() != nullptr) {
    const int64_t got_bytes = command.values == nullptr ? 0 : static_cast<int64_t>(command.values->size());
    if (got_bytes != want_bytes) {
      return Error(absl::StatusCode::kInvalidArgument, session->rank(), what,
                   absl::StrCat("values have the wrong size (got ", got_bytes, ", want ", want_bytes, " bytes)"));
    }
    return Source{command.values == nullptr ? nullptr : command.values->data(), command.values};
  }
  const char* const staged = session->Staging(command.arg2, want_bytes);
  if (staged == nullptr) {
    return Error(absl::StatusCode::kInvalidArgument, session->rank(), what,
                 absl::StrCat("staging is out of range (got offset ", command.arg2, ", ", want_bytes, " bytes)"));
  }
  return Source{staged, session->memory()};
}

absl::Status ValueWrites::WriteGradient(Session* session, const WriteRequest& request, Source source) {
  const ParamPlan& param = see_.plan->params[request.param];
  const int64_t gradient =
      see_.plan->flat_params[param.flat_param].gradients_offset_bytes + param.offset * request.element_bytes;
  SlabPart zero{use_.memory->gradients(), gradient, request.element_bytes, 0};
  if (!use_.presence->has(request.param)) {
    zero.numel = param.numel;  // what lies there is of no step
  }
  use_.presence->Set(request.param, true);
  written_gradients_[request.param] = true;
  return CopyFor(session, {use_.memory->gradients(), request.size_bytes() + zero.size_bytes(), /*of_gradient=*/true},
                 [slab = use_.memory->gradients(), gradient, zero, request,
                  source = std::move(source)](bool* more) mutable -> absl::Status {
                   if (zero.numel > 0) {
                     *more = true;
                     return zero.ClearSome();
                   }
                   return slab->Write(gradient + request.first * request.element_bytes, source.data,
                                      request.size_bytes());
                 });
}

absl::Status ValueWrites::WritePart(Session* session, const WriteRequest& request, Source source) {
  const SlabPart whole = WholePart(*see_.plan, *use_.memory, request.param, request.part);
  written_parts_[static_cast<size_t>(request.param)] |= uint32_t{1} << request.part;
  // Of what other nodes hold, those keep theirs: every node's ranks may write whole parameters.
  const ParamRange own = ElementsOfNode(*see_.plan, request.param);
  const int64_t first = std::max(request.first, own.first);
  const int64_t numel = std::min(request.first + request.numel, own.first + own.numel) - first;
  if (whole.slab == nullptr || (numel <= 0 && see_.plan->cut_over_nodes)) {
    return absl::OkStatus();
  }
  const SlabPart to{whole.slab, whole.offset_bytes + first * whole.element_bytes, whole.element_bytes, numel};
  const char* const from = source.data + (first - request.first) * whole.element_bytes;
  const uint64_t version = use_.counts->version();
  UndoSlab* const undo = version == 0 ? nullptr : use_.memory->undo();  // the memory outlives copies
  if (undo != nullptr) {
    undo_.WillSave(version);
  }
  SlabPart stale;  // initial values are one attempt's
  if (version == 0 && initial_.Write(request.param, request.part, use_.counts->epoch())) {
    stale = PartOfNode(*see_.plan, *use_.memory, request.param, request.part);
  }
  return CopyFor(
      session, {to.slab, to.size_bytes() + stale.size_bytes()},
      [to, stale, undo, version, from, memory = std::move(source.memory)](bool* more) mutable -> absl::Status {
        if (stale.numel > 0) {
          *more = true;
          return stale.ClearSome();
        }
        if (undo != nullptr) {
          SHARDD_RETURN_IF_ERROR(undo->Save(to.slab, to.offset_bytes, to.size_bytes(), version));
        }
        return to.slab->Write(to.offset_bytes, from, to.size_bytes());
      });
}

absl::Status ValueWrites::CopyFor(Session* session, const Copying& copying, ValueCopies::Copy copy) {
  if (copies_.IsMadeAtOnce(*copying.slab, copying.size_bytes)) {
    absl::Status status;
    bool more = true;
    while (more && status.ok()) {
      more = false;
      status = copy(&more);
    }
    return status;
  }
  const bool of_gradient = copying.of_gradient;
  session->held = true;
  if (of_gradient) use_.work->BeginGradientWork();
  Run(std::move(copy), [this, of_gradient, id = session->id(), epoch = use_.counts->epoch()](absl::Status status) {
    if (of_gradient) use_.work->EndGradientWork();
    // Of an epoch that has ended, the loss of the device alone means anything.
    if (!status.ok() && (epoch == use_.counts->epoch() || absl::IsDataLoss(status))) {
      use_.job->Fail(std::move(status));
      return;
    }
    if (Session* held = see_.sessions->Find(id); held != nullptr) {
      Release(held);
    }
  });
  return absl::OkStatus();
}

void ValueWrites::Run(ValueCopies::Copy copy, ValueCopies::Then then) {
  copies_.Run(use_.work->Keep(), std::move(copy), use_.work->AndAdvance(std::move(then)));
}

void ValueWrites::WhenUndoIsIdle(ValueCopies::Then then) {
  if (copies_.idle()) {
    then(absl::OkStatus());
  } else {
    Run([](bool*) { return absl::OkStatus(); }, std::move(then));
  }
}

void ValueWrites::Release(Session* session) {
  session->held = false;
  session->words().NoteProgress();
  if (std::exchange(session->consumes_when_released, false)) {
    session->PublishConsumed();
  }
  see_.sessions->PostReleased(session);
}

void ValueWrites::Undo() {
  written_parts_.assign(see_.plan->params.size(), 0);
  std::vector<int64_t> counts = use_.counts->step_counts();
  const std::optional<uint64_t> of_version = undo_.BeginUndo(&counts);
  use_.counts->SetStepCounts(std::move(counts));
  if (!of_version.has_value()) {
    if (!undo_.undoing() && use_.taken_back != nullptr) use_.taken_back();
    return;
  }
  // Nobody is to read what is half put back: ranks that are here are held, others cannot attach (AddSession).
  for (const auto& session : *see_.sessions) {
    if (session != nullptr) session->held = true;
  }
  Run(
      [undo = use_.memory->undo(), version = *of_version, is_back = false](bool* more) mutable -> absl::Status {
        if (is_back) {
          undo->Forget(more);
          return absl::OkStatus();
        }
        SHARDD_RETURN_IF_ERROR(undo->PutBack(version, more));
        is_back = !*more;
        *more = true;
        return absl::OkStatus();
      },
      [this](const absl::Status& status) {
        undo_.EndUndo();
        if (!status.ok()) {
          use_.job->Close(absl::StrCat("take back what was not committed: ", status.message()));
          return;
        }
        if (use_.taken_back != nullptr) use_.taken_back();
        for (const auto& session : *see_.sessions) {
          if (session != nullptr && session->held) {
            Release(session.get());
          }
        }
      });
}

absl::Status ValueWrites::AskForCommit(int rank) {
  const bool writeback = WritesBack(rank);
  if (see_.decision->committing() || (use_.counts->version() != 0 && !writeback) || commit_.asked(rank)) {
    return Error(absl::StatusCode::kFailedPrecondition, rank, "CommitParameters",
                 commit_.asked(rank)
                     ? "the rank has already sent it"
                     : "legal before version 1 and between EnterFullParams(writeback) and LeaveFullParams");
  }
  SHARDD_RETURN_IF_ERROR(see_.extensions->CheckAllTakePart(rank, "CommitParameters"));
  if (writeback && see_.summons->full_params().request(rank).of_edits) {
    // Each node has edits of its own, or none: it counts as having written the values of all parameters.
    for (uint32_t& parts : written_parts_) parts |= 1;
  }
  commit_.Ask(rank);
  return absl::OkStatus();
}

std::vector<SlabPart> ValueWrites::StaleParts() const {
  std::vector<SlabPart> stale;
  for (const auto& [param, part] : initial_.WrittenBefore(use_.counts->epoch())) {
    stale.push_back(PartOfNode(*see_.plan, *use_.memory, param, part));
  }
  return stale;
}

void ValueWrites::Commit() {
  use_.commits->Begin();
  written_parts_.assign(see_.plan->params.size(), 0);
  const bool forgets = undo_.BeginCommit();
  ClearStale([this, forgets, epoch = use_.counts->epoch()](const absl::Status& status) {
    if (epoch != use_.counts->epoch()) {
      return;  // the job was closed
    }
    if (status.ok()) {
      SubmitCommit(forgets);
    } else {
      use_.commits->GiveUp(kCommit, status);
    }
  });
}

void ValueWrites::SubmitCommit(bool forgets) {
  // Gradients that were written back are carried to the replicas' copies.
  const std::vector<bool> gradients =
      std::exchange(written_gradients_, std::vector<bool>(see_.plan->params.size(), false));
  // Over nodes it was kept before it was said, and nobody knows who has stored into the shards since.
  const bool kept = use_.snapshots != nullptr && use_.snapshots->snapshot().two();
  const SlabPointers from = kept ? use_.snapshots->snapshot().NextPointers() : use_.memory->pointers();
  Commits::Version version;
  version.what = kCommit;
  version.label = "cast";
  version.ops.resize(static_cast<size_t>(see_.plan->world_size));
  for (int rank = 0; rank < see_.plan->world_size; ++rank) {
    std::vector<DeviceOp>& ops = version.ops[static_cast<size_t>(rank)];
    ops = CommitOps(*see_.plan, from, rank);
    for (DeviceOp& op : GradientCopyOps(*see_.plan, use_.memory->pointers(), gradients, rank)) {
      ops.push_back(std::move(op));
    }
  }
  version.snapshot_is_due = true;
  version.commit = [this, forgets] {
    const std::vector<std::string> states = std::exchange(promised_states_, {});
    for (size_t rank = 0; rank < states.size(); ++rank) {
      if (!states[rank].empty()) use_.counts->SetTrainerState(static_cast<int>(rank), states[rank]);
    }
    use_.counts->CommitValues();
    if (forgets) ForgetOldBytes();  // which are void from here on
    use_.events->Add(-1, "parameters", absl::StrCat("version ", use_.counts->version()));
  };
  use_.commits->Make(std::move(version));
}

void ValueWrites::ClearStale(ValueCopies::Then then) {
  std::vector<SlabPart> stale = StaleParts();
  initial_.Committed();
  if (stale.empty()) {
    then(absl::OkStatus());
    return;
  }
  Run(
      [stale = std::move(stale)](bool* more) mutable -> absl::Status {
        while (!stale.empty() && stale.back().numel == 0) {
          stale.pop_back();
        }
        if (stale.empty()) {
          return absl::OkStatus();
        }
        *more = true;
        return stale.back().ClearSome();
      },
      std::move(then));
}

absl::Status ValueWrites::CheckMayBegin(const std::string& what) {
  if (undo_.undoing()) {
    return absl::AbortedError(
        absl::StrCat(what, "what was written and not committed is being taken back; attach again"));
  }
  if (commit_.reading()) {
    return absl::AbortedError(
        absl::StrCat(what, "initial values of the epoch that ended are still being read; attach again"));
  }
  return absl::OkStatus();
}

// Should the state not come, and nobody have any: as what an attempt at initial values wrote that was given up, for the
// next to clear.
void ValueWrites::BeginRestore() {
  for (int p = 0; p < static_cast<int>(see_.plan->params.size()); ++p) {
    for (int what = 0; what <= see_.plan->optimizer_states; ++what) {
      if (WholePart(*see_.plan, *use_.memory, p, what).slab != nullptr) {
        initial_.MarkTorn(p, what);
      }
    }
  }
  // What comes may begin at a version that old bytes are of, of what is lost.
  if (use_.memory->undo() != nullptr) ForgetOldBytes();
}

void ValueWrites::ForgetOldBytes() {
  Run([undo = use_.memory->undo()](bool* more) { return undo->Forget(more), absl::OkStatus(); },
      [](const absl::Status&) {});
}

void ValueWrites::EndEpoch() {
  commit_.EndEpoch();
  written_parts_.assign(see_.plan->params.size(), 0);
  written_gradients_.assign(see_.plan->params.size(), false);
  promised_states_.clear();
}

absl::Status ValueWrites::Error(absl::StatusCode code, int rank, absl::string_view what, absl::string_view fact) const {
  return use_.counts->RankError(code, rank, what, fact);
}

}  // namespace shardd
