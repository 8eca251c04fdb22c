#include "client/c/job/values.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "client/c/attachment/call_span.h"
#include "common/plan/whole_params.h"
#include "common/status/status_macros.h"

namespace shardd {

absl::Status Values::WriteElements(int param, const void* data, int64_t first, int64_t numel, int64_t element_bytes,
                                   uint32_t flags) {
  const int64_t chunk_numel = Staging::kHalfBytes / element_bytes;
  for (int64_t done = 0; done < numel; done += chunk_numel) {
    const int64_t count = std::min(chunk_numel, numel - done);
    CommandRecord record = {};
    SHARDD_ASSIGN_OR_RETURN(record.arg2, staging_.PutElements(static_cast<const char*>(data) + done * element_bytes,
                                                              count * element_bytes));
    record.opcode = Opcode::kWriteParameters;
    record.flags = flags;
    record.group = param;
    record.arg0 = first + done;
    record.arg1 = count;
    SHARDD_RETURN_IF_ERROR(
        attachment_.Send(record, /*act=*/true, {"write_parameter", nullptr, "space in the command ring"}));
    staging_.ElementsSent();
  }
  return absl::OkStatus();
}

absl::Status Values::CheckRange(const char* call, int index, const void* data, int64_t first, int64_t numel,
                                int64_t of) const {
  const ParamPlan& param = attachment_.plan().param(index);
  if (first < 0 || numel < 0 || first > of || numel > of - first) {
    return absl::InvalidArgumentError(absl::StrCat(call, " \"", param.fqn, "\": range is outside of it (got [", first,
                                                   ", ", first, " + ", numel, "), want within [0, ", of,
                                                   "); rank=", attachment_.rank(), ")"));
  }
  if (numel > 0 && data == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(call, " \"", param.fqn, "\": data is NULL"));
  }
  return absl::OkStatus();
}

absl::Status Values::CheckWritable(const char* call, int index) const {
  if (commit_sent_ || !(initial() || full_params_.written_back())) {
    return absl::FailedPreconditionError(
        absl::StrCat(call, " \"", attachment_.plan().param(index).fqn, "\": parameters cannot be written now (version ",
                     attachment_.ledger().expected_version(), "; rank=", attachment_.rank(),
                     "); write before the first shardd_commit_parameters, or between ",
                     "shardd_enter_full_params with writeback and shardd_commit_parameters"));
  }
  return initial() ? absl::OkStatus() : full_params_.CheckEntered(call, index);
}

absl::Status Values::WriteParameter(int index, const void* data, int64_t first, int64_t numel) {
  const ParamPlan& param = attachment_.plan().param(index);
  CallSpan span(attachment_, v1::TRACE_CALL_WRITE_PARAMETER, param.group);
  return span.Of(WriteWithin(index, data, first, numel));
}

absl::Status Values::WriteWithin(int index, const void* data, int64_t first, int64_t numel) {
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  SHARDD_RETURN_IF_ERROR(
      CheckRange("write_parameter", index, data, first, numel, attachment_.plan().param(index).numel));
  SHARDD_RETURN_IF_ERROR(CheckWritable("write_parameter", index));
  return WriteElements(index, data, first, numel, DTypeSizeBytes(attachment_.plan().param(index).dtype), 0);
}

absl::Status Values::WriteGradient(int index, const void* data, int64_t first, int64_t numel) {
  const ParamPlan& param = attachment_.plan().param(index);
  CallSpan span(attachment_, v1::TRACE_CALL_WRITE_GRADIENT, param.group);
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  SHARDD_RETURN_IF_ERROR(CheckRange("write_gradient", index, data, first, numel, param.numel));
  const bool writable = full_params_.written_back() && full_params_.with_grads() && !commit_sent_;
  if (!writable || !param.requires_grad) {
    return absl::FailedPreconditionError(absl::StrCat(
        "write_gradient \"", param.fqn,
        "\": ", param.requires_grad ? "gradients cannot be written now (rank=" : "the parameter is frozen (rank=",
        attachment_.rank(),
        param.requires_grad ? "); write between shardd_enter_full_params_with writeback and with_grads and "
                              "shardd_commit_parameters"
                            : ")"));
  }
  SHARDD_RETURN_IF_ERROR(full_params_.CheckEntered("write_gradient", index));
  return span.Of(WriteElements(index, data, first, numel, DTypeSizeBytes(v1::DTYPE_FLOAT32), kOfGradient));
}

absl::Status Values::WriteOptimizerState(int index, int state, const float* data, int64_t first, int64_t numel) {
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  const RankPlan& plan = attachment_.plan();
  const ParamPlan& param = plan.param(index);
  const int states = !plan.trainers_optimize() && param.requires_grad ? plan.flat_of(param).optimizer_states : 0;
  if (state < 0 || state >= states) {
    return absl::InvalidArgumentError(absl::StrCat("write_optimizer_state \"", param.fqn,
                                                   "\": the daemon keeps no such state (got ", state,
                                                   ", want less than ", states, "; rank=", plan.rank(), ")"));
  }
  SHARDD_RETURN_IF_ERROR(
      CheckRange("write_optimizer_state", index, data, first, numel, StateNumel(plan.plan(), index, state)));
  SHARDD_RETURN_IF_ERROR(CheckWritable("write_optimizer_state", index));
  return WriteElements(index, data, first, numel, DTypeSizeBytes(v1::DTYPE_FLOAT32),
                       static_cast<uint32_t>(state + 1) << kWrittenStateShift);
}

absl::Status Values::WriteUpdateCount(int index, int64_t count) {
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  const ParamPlan& param = attachment_.plan().param(index);
  if (count < 0 || count > kMaxUpdates || !param.requires_grad) {
    return absl::InvalidArgumentError(
        absl::StrCat("write_update_count \"", param.fqn,
                     "\": ", param.requires_grad ? "out of range (got " : "the parameter is frozen (got ", count,
                     ", want 0 to 2^53; rank=", attachment_.rank(), ")"));
  }
  SHARDD_RETURN_IF_ERROR(CheckWritable("write_update_count", index));
  CommandRecord record = {};
  record.opcode = Opcode::kWriteParameters;
  record.flags = ~uint32_t{0} << kWrittenStateShift;  // -1
  record.group = index;
  record.arg0 = count;
  return attachment_.Send(record, /*act=*/false, {"write_update_count", nullptr, "space in the command ring"});
}

absl::Status Values::Commit() {
  CallSpan span(attachment_, v1::TRACE_CALL_COMMIT_PARAMETERS);
  return span.Of(CommitWithin());
}

absl::Status Values::CommitWithin() {
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  StepLedger& ledger = attachment_.ledger();
  const WaitFor reason{"commit_parameters", nullptr, "the new version (every rank has to commit)"};
  if (!commit_sent_) {
    if (!(initial() || full_params_.written_back())) {
      return absl::FailedPreconditionError(absl::StrCat("commit_parameters job \"", attachment_.plan().job(),
                                                        "\": nothing can have been written (version ",
                                                        ledger.expected_version(), "; rank=", attachment_.rank(),
                                                        "); call shardd_enter_full_params with writeback first"));
    }
    SHARDD_RETURN_IF_ERROR(initial() ? absl::OkStatus() : full_params_.CheckNotStored());
    CommandRecord record = {};
    record.opcode = Opcode::kCommitParameters;
    SHARDD_RETURN_IF_ERROR(attachment_.Send(record, /*act=*/true, reason));
    commit_sent_ = true;
  }
  // After a deadline the call may be made again and goes on waiting.
  SHARDD_RETURN_IF_ERROR(attachment_.Wait(attachment_.page().version, ledger.expected_version() + 1, reason));
  ledger.ParametersCommitted();
  commit_sent_ = false;
  full_params_.Committed();
  return absl::OkStatus();
}

}  // namespace shardd
