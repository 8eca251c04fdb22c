// Values from trainers: initial ones, writeback of full parameters, and with them the state of the daemon's optimizer.
// Nothing of it is in a version before every rank has sent CommitParameters; until then it can be undone (writes/).

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/job_core.h"
#include "server/observe/log.h"

namespace shardd {
absl::Status JobCore::OnWriteParameters(Session* session, const RankCommand& command) {
  const int rank = session->rank();
  const bool writeback = summons_.full_params().inside(rank) && summons_.full_params().writes(rank);
  if (command.group < 0 || command.group >= static_cast<int>(plan_->params.size())) {
    return committed_.RankError(
        absl::StatusCode::kInvalidArgument, rank, "WriteParameters",
        absl::StrCat("no such parameter (got ", command.group, ", want 0 to ", plan_->params.size() - 1, ")"));
  }
  const ParamPlan& param = plan_->params[command.group];
  const std::string what = absl::StrCat("WriteParameters \"", param.fqn, "\"");
  if (decision_.committing() || (committed_.version() != 0 && !writeback)) {
    return committed_.RankError(absl::StatusCode::kFailedPrecondition, rank, what,
                                "parameters may be written before version 1 and between EnterFullParams(writeback) and "
                                "CommitParameters");
  }
  if (value_commit_.asked(rank)) {
    return committed_.RankError(absl::StatusCode::kFailedPrecondition, rank, what,
                                "the rank has already sent CommitParameters");
  }
  if (writeback) {
    if (absl::Status may = summons_.full_params().CheckMayWrite(*plan_, rank, command.group); !may.ok()) {
      return committed_.RankError(may.code(), rank, what, may.message());
    }
  }
  const absl::StatusOr<WriteRequest> request =
      ParseWrite(*plan_, command, /*gradients=*/writeback && summons_.full_params().request(rank).with_grads);
  if (!request.ok()) {
    return committed_.RankError(request.status().code(), rank, what, request.status().message());
  }
  if (request->target == WriteRequest::Target::kUpdateCount) {
    undo_.SaveCount(request->param, committed_.step_counts()[request->param]);
    committed_.SetStepCount(request->param, request->count);
    return absl::OkStatus();
  }
  const char* source = session->Staging(command.arg2, request->size_bytes());
  if (source == nullptr) {
    return committed_.RankError(
        absl::StatusCode::kInvalidArgument, rank, what,
        absl::StrCat("staging is out of range (got offset ", command.arg2, ", ", request->size_bytes(), " bytes)"));
  }
  return request->target == WriteRequest::Target::kGradient ? WriteGradient(session, *request, source)
                                                            : WritePart(session, *request, source);
}

absl::Status JobCore::WriteGradient(Session* session, const WriteRequest& request, const char* source) {
  const ParamPlan& param = plan_->params[request.param];
  const int64_t gradient =
      plan_->flat_params[param.flat_param].gradients_offset_bytes + param.offset * request.element_bytes;
  SlabPart zero{memory_->gradients(), gradient, request.element_bytes, 0};
  if (!pairing_.presence().has(request.param)) {
    zero.numel = param.numel;  // what lies there is of no step
  }
  pairing_.presence().Set(request.param, true);
  written_gradients_[request.param] = true;
  return CopyFor(session, {memory_->gradients(), request.size_bytes() + zero.size_bytes(), /*of_gradient=*/true},
                 [slab = memory_->gradients(), gradient, zero, request, source,
                  memory = session->memory()](bool* more) mutable -> absl::Status {
                   if (zero.numel > 0) {
                     *more = true;
                     return zero.ClearSome();
                   }
                   return slab->Write(gradient + request.first * request.element_bytes, source, request.size_bytes());
                 });
}

absl::Status JobCore::WritePart(Session* session, const WriteRequest& request, const char* source) {
  const SlabPart whole = WholePart(*plan_, *memory_, request.param, request.part);
  // Of what other nodes hold, those keep theirs: every node's ranks may write whole parameters.
  const ParamRange own = ElementsOfNode(*plan_, request.param);
  const int64_t first = std::max(request.first, own.first);
  const int64_t numel = std::min(request.first + request.numel, own.first + own.numel) - first;
  if (whole.slab == nullptr || (numel <= 0 && plan_->cut_over_nodes)) {
    return absl::OkStatus();
  }
  const SlabPart to{whole.slab, whole.offset_bytes + first * whole.element_bytes, whole.element_bytes, numel};
  const char* const from = source + (first - request.first) * whole.element_bytes;
  const bool undo = committed_.version() != 0;
  if (undo) {
    undo_.WillSave();
  }
  SlabPart stale;  // initial values are one attempt's
  if (!undo && initial_values_.Write(request.param, request.part, committed_.epoch())) {
    stale = PartOfNode(*plan_, *memory_, request.param, request.part);
  }
  return CopyFor(session, {to.slab, to.size_bytes() + stale.size_bytes()},
                 [this, to, stale, undo, from, memory = session->memory()](bool* more) mutable -> absl::Status {
                   if (stale.numel > 0) {
                     *more = true;
                     return stale.ClearSome();
                   }
                   if (undo) {
                     SHARDD_RETURN_IF_ERROR(undo_.Save(to.slab, to.offset_bytes, to.size_bytes()));
                   }
                   return to.slab->Write(to.offset_bytes, from, to.size_bytes());
                 });
}

// A copy that is made off the loop holds the session until it has ended: its commands wait in its ring, in their order,
// and everybody else goes on.
absl::Status JobCore::CopyFor(Session* session, const Copying& copying, ValueCopies::Copy copy) {
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
  if (of_gradient) work_.BeginGradientWork();
  CopyOffLoop(std::move(copy),
              [this, of_gradient, id = session->id(), epoch = committed_.epoch()](absl::Status status) {
                if (of_gradient) work_.EndGradientWork();
                // Of an epoch that has ended, the loss of the device alone means anything.
                if (!status.ok() && (epoch == committed_.epoch() || absl::IsDataLoss(status))) {
                  Abort(std::move(status), {});
                  return;
                }
                if (Session* held = FindSession(id); held != nullptr) {
                  Release(held);
                }
              });
  return absl::OkStatus();
}

void JobCore::CopyOffLoop(ValueCopies::Copy copy, ValueCopies::Then then) {
  copies_.Run(shared_from_this(), std::move(copy), [this, then = std::move(then)](absl::Status status) {
    then(std::move(status));
    Advance();
  });
}

void JobCore::Release(Session* session) {
  session->held = false;
  session->words().NoteProgress();
  if (std::exchange(session->consumes_when_released, false)) {
    session->PublishConsumed();
  }
  for (auto& closure : std::exchange(session->when_released, {})) {
    loop_->Post(std::move(closure));
  }
}

void JobCore::UndoWrites() {
  std::vector<int64_t> counts = committed_.step_counts();
  const bool has_bytes = undo_.BeginUndo(&counts);
  committed_.SetStepCounts(std::move(counts));
  if (!has_bytes) {
    return;
  }
  // Nobody is to read what is half put back: ranks that are here are held, others cannot attach (AddSession).
  for (const auto& session : sessions_) {
    if (session != nullptr) {
      session->held = true;
    }
  }
  CopyOffLoop([this](bool* more) { return undo_.PutBack(more); },
              [this](const absl::Status& status) {
                undo_.EndUndo();
                if (!status.ok()) {
                  Close(absl::StrCat("take back what was not committed: ", status.message()));
                  return;
                }
                for (const auto& session : sessions_) {
                  if (session != nullptr && session->held) {
                    Release(session.get());
                  }
                }
              });
}

absl::Status JobCore::OnLeaveFullParams(Session* session, uint64_t done) {
  bool last = false;
  SHARDD_RETURN_IF_ERROR(summons_.Leave(session, done, &last));
  value_commit_.Forget(session->rank());
  if (last) {
    UndoWrites();  // writes that nobody committed
  }
  return absl::OkStatus();
}

absl::Status JobCore::OnCommitParameters(Session* session) {
  const int rank = session->rank();
  const bool writeback = summons_.full_params().inside(rank) && summons_.full_params().writes(rank);
  if (decision_.committing() || (committed_.version() != 0 && !writeback) || value_commit_.asked(rank)) {
    return committed_.RankError(
        absl::StatusCode::kFailedPrecondition, rank, "CommitParameters",
        value_commit_.asked(rank)
            ? "the rank has already sent it"
            : "legal before version 1 and between EnterFullParams(writeback) and LeaveFullParams");
  }
  SHARDD_RETURN_IF_ERROR(extensions_.CheckAllTakePart(rank, "CommitParameters"));
  value_commit_.Ask(rank);
  return absl::OkStatus();
}

absl::Status JobCore::BeginValuesCommit() {
  if (nodes_ != nullptr) {
    value_commit_.BeginSaying();
    SayValues();  // CommitValues comes when all nodes have the same
    return absl::OkStatus();
  }
  return CommitValues();
}

std::vector<SlabPart> JobCore::StaleValues() const {
  std::vector<SlabPart> stale;
  for (const auto& [param, part] : initial_values_.WrittenBefore(committed_.epoch())) {
    stale.push_back(PartOfNode(*plan_, *memory_, param, part));
  }
  return stale;
}

absl::Status JobCore::CommitValues() {
  std::vector<SlabPart> stale = StaleValues();
  initial_values_.Committed();
  decision_.BeginCommit();  // from here on it completes forward
  if (!undo_.BeginCommit() && stale.empty()) {
    SubmitParametersCommit();
    return absl::OkStatus();
  }
  auto copy = [this, stale = std::move(stale)](bool* more) mutable -> absl::Status {
    undo_.Forget(more);
    while (!stale.empty() && stale.back().numel == 0) {
      stale.pop_back();
    }
    if (*more || stale.empty()) {
      return absl::OkStatus();
    }
    *more = true;
    return stale.back().ClearSome();
  };
  CopyOffLoop(std::move(copy), [this](const absl::Status& status) {
    if (status.ok() && !closed_) {
      SubmitParametersCommit();
      return;
    }
    decision_.End();
    if (closed_) {
      return;
    }
    Close(absl::StrCat("commit of parameters: ", status.message()));
  });
  return absl::OkStatus();
}

void JobCore::SubmitParametersCommit() {
  auto done = work_.Join(optimizer_devices_.count(), [this](const absl::Status& status) {
    if (!status.ok()) {
      LogError(absl::StrCat("job ", name(), ": commit of parameters: ", status.message()));
      decision_.End();
      Close(absl::StrCat("commit of parameters: ", status.message()));
      return;
    }
    KeepThen(/*due=*/true, [this] { FinishParametersCommit(); });
  });
  DeviceOps ops(world_size());
  for (int r = 0; r < world_size(); ++r) {
    ops[r] = CommitOps(*plan_, memory_->pointers(), r);
    for (DeviceOp& op : GradientCopyOps(*plan_, memory_->pointers(), written_gradients_, r)) {
      ops[r].push_back(std::move(op));
    }
  }
  optimizer_devices_.Submit(absl::StrCat("cast version ", committed_.version() + 1),
                            optimizer_devices_.Divide(std::move(ops)), done);
  written_gradients_.assign(plan_->params.size(), false);
}

void JobCore::FinishParametersCommit() {
  decision_.End();
  if (closed_) {
    return;
  }
  committed_.CommitVersion();
  snapshot_.Outdate();
  value_commit_.Committed();
  summons_.WritesCommitted();
  unsharding_.NewVersion();
  events_.Add(-1, "parameters", absl::StrCat("version ", committed_.version()));
  AfterCommit();
}

}  // namespace shardd
