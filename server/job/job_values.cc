// Values from trainers: initial ones, writeback of full parameters, and with them the state of the daemon's optimizer.
// Nothing of it is in a version before every rank has sent CommitParameters; old bytes are kept until then.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"
#include "server/job/job_core.h"
#include "server/observe/log.h"

namespace shardd {
// Where `what` of a parameter lies: 0 itself, k > 0 its optimizer state k - 1. Null: the job has no such state.
JobCore::Written JobCore::WrittenPart(const ParamPlan& param, int what) const {
  const FlatParamPlan& flat = plan_->flat_params[param.flat_param];
  if (what == 0) {
    const int64_t element_bytes = DTypeSizeBytes(param.dtype);
    return {memory_->shards(), flat.shards_offset_bytes + param.offset * element_bytes, element_bytes};
  }
  const bool updates = plan_->config.optimizer().kind() != v1::OPTIMIZER_KIND_TRAINER;
  if (!updates || !param.requires_grad || flat.optimizer_offset_bytes < 0 || what < 0 ||
      what > plan_->optimizer_states) {
    return {};
  }
  const int64_t element_bytes = DTypeSizeBytes(v1::DTYPE_FLOAT32);
  return {memory_->optimizer(),
          flat.optimizer_offset_bytes + (what - 1) * flat.StateStrideBytes() + param.offset * element_bytes,
          element_bytes};
}

absl::Status JobCore::OnWriteParameters(Session* session, const RankCommand& command) {
  const int rank = session->rank();
  const bool writeback = ranks_[rank].inside && ranks_[rank].writeback;
  if (command.group < 0 || command.group >= static_cast<int>(plan_->params.size())) {
    return RankError(
        absl::StatusCode::kInvalidArgument, rank, "WriteParameters",
        absl::StrCat("no such parameter (got ", command.group, ", want 0 to ", plan_->params.size() - 1, ")"));
  }
  const ParamPlan& param = plan_->params[command.group];
  const std::string what = absl::StrCat("WriteParameters \"", param.fqn, "\"");
  if (committing_ || (version_ != 0 && !writeback)) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, what,
                     "parameters may be written before version 1 and between EnterFullParams(writeback) and "
                     "CommitParameters");
  }
  if (ranks_[rank].committed_params) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, what, "the rank has already sent CommitParameters");
  }
  if (writeback) {
    SHARDD_RETURN_IF_ERROR(CheckSummoned(rank, command.group, what));
  }
  const int state = static_cast<int16_t>(command.flags >> kWrittenStateShift);
  if (state != 0 && (command.flags & kOfGradient) != 0) {
    return RankError(absl::StatusCode::kInvalidArgument, rank, what,
                     absl::StrCat("either a gradient or optimizer state (got both; state ", state, ")"));
  }
  const Written written = WrittenPart(param, std::max(state, -state));  // a count belongs to the first state
  if (state < -1 || (written.slab == nullptr && state >= 0) || (state == -1 && !param.requires_grad)) {
    return RankError(absl::StatusCode::kInvalidArgument, rank, what,
                     absl::StrCat("no such optimizer state (got ", state, ", want -1 to ",
                                  param.requires_grad ? plan_->optimizer_states : 0, ")"));
  }
  if (state == -1) {
    if (command.arg0 < 0 || command.arg0 > kMaxUpdates) {
      return RankError(
          absl::StatusCode::kInvalidArgument, rank, what,
          absl::StrCat("count of updates is out of range (got ", command.arg0, ", want 0 to ", kMaxUpdates, ")"));
    }
    undo_counts_.try_emplace(command.group, step_counts_[command.group]);
    step_counts_[command.group] = command.arg0;
    return absl::OkStatus();
  }
  if (command.arg0 < 0 || command.arg1 < 0 || command.arg0 > param.numel || command.arg1 > param.numel - command.arg0) {
    return RankError(absl::StatusCode::kInvalidArgument, rank, what,
                     absl::StrCat("elements are out of range (got ", command.arg0, " + ", command.arg1,
                                  ", want within ", param.numel, ")"));
  }
  const FlatParamPlan& flat = plan_->flat_params[param.flat_param];
  const bool of_gradient = (command.flags & kOfGradient) != 0;
  if (of_gradient && !(writeback && ranks_[rank].full.with_grads && param.requires_grad)) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, what,
                     param.requires_grad ? "gradients may be written after EnterFullParams(writeback, with_grads)"
                                         : "a frozen parameter has no gradient");
  }
  const int64_t element = of_gradient ? sizeof(float) : written.element_bytes;
  const int64_t size = command.arg1 * element;
  const char* source = session->Staging(command.arg2, size);
  if (source == nullptr) {
    return RankError(absl::StatusCode::kInvalidArgument, rank, what,
                     absl::StrCat("staging is out of range (got offset ", command.arg2, ", ", size, " bytes)"));
  }
  const std::shared_ptr<SessionMemory>& memory = session->memory();  // of `source`
  if (of_gradient) {
    const int64_t gradient = flat.gradients_offset_bytes + param.offset * element;
    const bool zero = !present_[command.group];  // what lies there is of no step
    present_[command.group] = true;
    written_gradients_[command.group] = true;
    return CopyFor(session, {memory_->gradients(), size + (zero ? param.numel * element : 0), /*of_gradient=*/true},
                   [slab = memory_->gradients(), gradient, zero, whole = param.numel * element,
                    offset = command.arg0 * element, source, size, memory]() -> absl::Status {
                     if (zero) {
                       SHARDD_RETURN_IF_ERROR(slab->Zero(gradient, whole));
                     }
                     return slab->Write(gradient + offset, source, size);
                   });
  }
  // Of what other nodes hold, those keep theirs: every node's ranks may write whole parameters.
  const ParamRange held = HeldOf(command.group);
  const int64_t first = std::max(command.arg0, held.first);
  const int64_t kept = std::min(command.arg0 + command.arg1, held.first + held.numel) - first;
  if (kept <= 0 && plan_->cut_over_nodes) {
    return absl::OkStatus();
  }
  const int64_t offset_bytes = written.offset_bytes + first * element;
  const char* const from = source + (first - command.arg0) * element;
  const int64_t kept_bytes = kept * element;
  bool clear = false;
  if (version_ == 0) {
    uint64_t& written_in = initial_writes_[{command.group, state}];
    clear = written_in != epoch_ && written_in != 0;  // by an attempt that was given up: initial values are one's
    written_in = epoch_;
  }
  const bool undo = version_ != 0;
  undo_kept_ = undo_kept_ || undo;
  const int64_t cleared_bytes = clear ? held.numel * element : 0;
  return CopyFor(
      session, {written.slab, kept_bytes + cleared_bytes},
      [this, whole = HeldPart(written, held), clear, undo, offset_bytes, from, kept_bytes, memory]() -> absl::Status {
        if (clear) {
          SHARDD_RETURN_IF_ERROR(Clear(whole.first, whole.second));
        }
        if (undo) {
          SHARDD_RETURN_IF_ERROR(SaveForUndo(whole.first.slab, offset_bytes, kept_bytes));
        }
        return whole.first.slab->Write(offset_bytes, from, kept_bytes);
      });
}

absl::Status JobCore::OnCommitParameters(Session* session) {
  const int rank = session->rank();
  const bool writeback = ranks_[rank].inside && ranks_[rank].writeback;
  if (committing_ || (version_ != 0 && !writeback) || ranks_[rank].committed_params) {
    return RankError(absl::StatusCode::kFailedPrecondition, rank, "CommitParameters",
                     ranks_[rank].committed_params
                         ? "the rank has already sent it"
                         : "legal before version 1 and between EnterFullParams(writeback) and LeaveFullParams");
  }
  SHARDD_RETURN_IF_ERROR(CheckNobodyFinished(rank, "CommitParameters"));
  ranks_[rank].committed_params = true;
  if (!std::all_of(ranks_.begin(), ranks_.end(), [](const RankStep& r) { return r.committed_params; })) {
    return absl::OkStatus();
  }
  if (nodes_ != nullptr) {
    SayValues();  // CommitValues comes when all nodes have the same
    return absl::OkStatus();
  }
  return CommitValues();
}

std::vector<std::pair<JobCore::Written, int64_t>> JobCore::StaleValues() const {
  std::vector<std::pair<Written, int64_t>> stale;
  for (const auto& [part, written_in] : initial_writes_) {
    if (written_in != epoch_) {
      stale.push_back(HeldPart(WrittenPart(plan_->params[part.first], part.second), HeldOf(part.first)));
    }
  }
  return stale;
}

absl::Status JobCore::CommitValues() {
  std::vector<std::pair<Written, int64_t>> stale = StaleValues();
  initial_writes_.clear();
  committing_ = true;  // from here on it completes forward
  undo_counts_.clear();
  const bool copies = std::exchange(undo_kept_, false) || !stale.empty();
  auto copy = [this, stale = std::move(stale)]() -> absl::Status {
    ForgetUndo();
    for (const auto& [written, numel] : stale) {
      CopierGoesOn();
      SHARDD_RETURN_IF_ERROR(Clear(written, numel));
    }
    return absl::OkStatus();
  };
  if (copies) {
    CopyOffLoop(std::move(copy), [this](const absl::Status& status) {
      if (status.ok() && !closed_) {
        SubmitParametersCommit();
        return;
      }
      committing_ = false;
      if (closed_) {
        return;
      }
      Close(absl::StrCat("commit of parameters: ", status.message()));
    });
    return absl::OkStatus();
  }
  SubmitParametersCommit();
  return absl::OkStatus();
}

void JobCore::SubmitParametersCommit() {
  auto done = Join(optimizer_devices_.count(), [this](const absl::Status& status) {
    if (!status.ok()) {
      LogError(absl::StrCat("job ", name(), ": commit of parameters: ", status.message()));
      committing_ = false;
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
  optimizer_devices_.Submit(absl::StrCat("cast version ", version_ + 1), optimizer_devices_.Divide(std::move(ops)),
                            done);
  written_gradients_.assign(plan_->params.size(), false);
}

void JobCore::FinishParametersCommit() {
  committing_ = false;
  if (closed_) {
    return;
  }
  ++version_;
  MarkKeptStale();
  for (RankStep& rank : ranks_) {
    rank.committed_params = false;
    rank.writeback = false;
  }
  for (UnshardPool& pool : pools_) {
    pool.Invalidate();
  }
  if (absl::Status status = journal_->WriteHeader({epoch_, committed_step_, version_}); !status.ok()) {
    LogError(absl::StrCat("job ", name(), ": ", status.message()));
  }
  Event(-1, "parameters", absl::StrCat("version ", version_));
  AfterCommit();
}

}  // namespace shardd
