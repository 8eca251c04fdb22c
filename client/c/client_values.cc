#include <errno.h>
#include <string.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/c/call_span.h"
#include "client/c/client_job.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

// The payload area stages parameters in two halves: one is filled while the daemon reads the other.
constexpr int64_t kHalfBytes = kStepPayloadBytes / 2;
constexpr int64_t kStagingAlignment = 64;

}  // namespace

absl::StatusOr<int64_t> ClientJob::Stage(const void* data, int64_t size_bytes) {
  const WaitFor reason{"write_parameter", nullptr, "staging space"};
  int64_t start = (progress_.half_used_bytes + kStagingAlignment - 1) / kStagingAlignment * kStagingAlignment;
  if (start + size_bytes > kHalfBytes) {
    progress_.half = 1 - progress_.half;
    start = 0;
  }
  if (start == 0) {
    SHARDD_RETURN_IF_ERROR(Note(session_->WaitConsumed(progress_.half_record[progress_.half], reason)));
  }
  progress_.half_used_bytes = start + size_bytes;
  const int64_t offset = layout_.payload_offset_bytes + progress_.half * kHalfBytes + start;
  memcpy(session_->memory().At<char>(offset), data, static_cast<size_t>(size_bytes));
  return offset;
}

absl::Status ClientJob::WriteElements(int index, const char* data, int64_t first, int64_t numel, int64_t element_bytes,
                                      uint32_t flags) {
  const int64_t chunk_numel = kHalfBytes / element_bytes;
  for (int64_t done = 0; done < numel; done += chunk_numel) {
    const int64_t count = std::min(chunk_numel, numel - done);
    CommandRecord record = {};
    SHARDD_ASSIGN_OR_RETURN(record.arg2, Stage(data + done * element_bytes, count * element_bytes));
    record.opcode = Opcode::kWriteParameters;
    record.flags = flags;
    record.group = index;
    record.arg0 = first + done;
    record.arg1 = count;
    const WaitFor reason{"write_parameter", nullptr, "space in the command ring"};
    SHARDD_RETURN_IF_ERROR(Note(session_->Send(record, /*act=*/true, reason)));
    progress_.half_record[progress_.half] = session_->submitted();
    progress_.payload_record = session_->submitted();
  }
  return absl::OkStatus();
}

absl::Status ClientJob::CheckRange(const char* call, int index, const void* data, int64_t first, int64_t numel) const {
  const ParamPlan& param = this->param(index);
  if (first < 0 || numel < 0 || first > param.numel || numel > param.numel - first) {
    return absl::InvalidArgumentError(absl::StrCat(call, " \"", param.fqn, "\": range is outside of it (got [", first,
                                                   ", ", first, " + ", numel, "), want within [0, ", param.numel,
                                                   "); rank=", rank(), ")"));
  }
  if (numel > 0 && data == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(call, " \"", param.fqn, "\": data is NULL"));
  }
  return absl::OkStatus();
}

absl::Status ClientJob::CheckSummoned(const char* call, int index) const {
  const bool others = progress_.full.rank0_only && rank() != 0;
  if (others || !progress_.summoned[static_cast<size_t>(index)]) {
    return absl::FailedPreconditionError(
        absl::StrCat(call, " \"", param(index).fqn, "\": ",
                     others ? std::string("rank 0 alone writes (rank0_only")
                            : absl::StrCat("not among the parameters of group \"", group_name(progress_.full.group),
                                           "\" that were entered (recurse ", int{progress_.full.recurse}),
                     "; rank=", rank(), ")"));
  }
  return absl::OkStatus();
}

absl::Status ClientJob::WriteParameter(int index, const void* data, int64_t first, int64_t numel) {
  CallSpan span(this, session_.get(), v1::TRACE_CALL_WRITE_PARAMETER, param(index).group);
  SHARDD_RETURN_IF_ERROR(Live());
  SHARDD_RETURN_IF_ERROR(CheckRange("write_parameter", index, data, first, numel));
  SHARDD_RETURN_IF_ERROR(CheckWritable("write_parameter", index));
  return span.Of(
      WriteElements(index, static_cast<const char*>(data), first, numel, DTypeSizeBytes(param(index).dtype), 0));
}

absl::Status ClientJob::WriteGradient(int index, const void* data, int64_t first, int64_t numel) {
  CallSpan span(this, session_.get(), v1::TRACE_CALL_WRITE_GRADIENT, param(index).group);
  SHARDD_RETURN_IF_ERROR(Live());
  SHARDD_RETURN_IF_ERROR(CheckRange("write_gradient", index, data, first, numel));
  const ParamPlan& param = this->param(index);
  const bool inside = progress_.full_params == FullParams::kInside && progress_.writeback && progress_.full.with_grads;
  if (!inside || progress_.commit_sent || !param.requires_grad) {
    return absl::FailedPreconditionError(absl::StrCat(
        "write_gradient \"", param.fqn, "\": ",
        param.requires_grad ? "gradients cannot be written now (rank=" : "the parameter is frozen (rank=", rank(),
        param.requires_grad ? "); write between shardd_enter_full_params_with writeback and with_grads and "
                              "shardd_commit_parameters"
                            : ")"));
  }
  SHARDD_RETURN_IF_ERROR(CheckSummoned("write_gradient", index));
  return span.Of(WriteElements(index, static_cast<const char*>(data), first, numel, DTypeSizeBytes(v1::DTYPE_FLOAT32),
                               kOfGradient));
}

absl::Status ClientJob::CheckWritable(const char* call, int index) const {
  const bool initial = expected_version_ == 0;
  if (progress_.commit_sent || !(initial || (progress_.full_params == FullParams::kInside && progress_.writeback))) {
    return absl::FailedPreconditionError(
        absl::StrCat(call, " \"", param(index).fqn, "\": parameters cannot be written now (version ", expected_version_,
                     "; rank=", rank(), "); write before the first shardd_commit_parameters, or between ",
                     "shardd_enter_full_params with writeback and shardd_commit_parameters"));
  }
  return initial ? absl::OkStatus() : CheckSummoned(call, index);
}

absl::Status ClientJob::WriteOptimizerState(int index, int state, const float* data, int64_t first, int64_t numel) {
  SHARDD_RETURN_IF_ERROR(Live());
  const bool daemons = plan_.config.optimizer().kind() != v1::OPTIMIZER_KIND_TRAINER;
  const int states = daemons && param(index).requires_grad ? plan_.optimizer_states : 0;
  if (state < 0 || state >= states) {
    return absl::InvalidArgumentError(absl::StrCat("write_optimizer_state \"", param(index).fqn,
                                                   "\": the daemon keeps no such state (got ", state,
                                                   ", want less than ", states, "; rank=", rank(), ")"));
  }
  SHARDD_RETURN_IF_ERROR(CheckRange("write_optimizer_state", index, data, first, numel));
  SHARDD_RETURN_IF_ERROR(CheckWritable("write_optimizer_state", index));
  progress_.state_loaded = true;
  return WriteElements(index, reinterpret_cast<const char*>(data), first, numel, DTypeSizeBytes(v1::DTYPE_FLOAT32),
                       static_cast<uint32_t>(state + 1) << kWrittenStateShift);
}

absl::Status ClientJob::WriteUpdateCount(int index, int64_t count) {
  SHARDD_RETURN_IF_ERROR(Live());
  if (count < 0 || count > kMaxUpdates || !param(index).requires_grad) {
    return absl::InvalidArgumentError(
        absl::StrCat("write_update_count \"", param(index).fqn,
                     "\": ", param(index).requires_grad ? "out of range (got " : "the parameter is frozen (got ", count,
                     ", want 0 to 2^53; rank=", rank(), ")"));
  }
  SHARDD_RETURN_IF_ERROR(CheckWritable("write_update_count", index));
  CommandRecord record = {};
  record.opcode = Opcode::kWriteParameters;
  record.flags = ~uint32_t{0} << kWrittenStateShift;  // -1
  record.group = index;
  record.arg0 = count;
  return Note(session_->Send(record, /*act=*/false, {"write_update_count", nullptr, "space in the command ring"}));
}

absl::Status ClientJob::CommitParameters() {
  CallSpan span(this, session_.get(), v1::TRACE_CALL_COMMIT_PARAMETERS);
  SHARDD_RETURN_IF_ERROR(Live());
  const WaitFor reason{"commit_parameters", nullptr, "the new version (every rank has to commit)"};
  if (!progress_.commit_sent) {
    const bool initial = expected_version_ == 0;
    if (!(initial || (progress_.full_params == FullParams::kInside && progress_.writeback))) {
      return absl::FailedPreconditionError(
          absl::StrCat("commit_parameters job \"", spec().name(), "\": nothing can have been written (version ",
                       expected_version_, "; rank=", rank(), "); call shardd_enter_full_params with writeback first"));
    }
    CommandRecord record = {};
    record.opcode = Opcode::kCommitParameters;
    SHARDD_RETURN_IF_ERROR(Note(session_->Send(record, /*act=*/true, reason)));
    progress_.commit_sent = true;
  }
  // After a deadline the call may be made again and goes on waiting.
  SHARDD_RETURN_IF_ERROR(Note(session_->Wait(session_->daemon_page().page().version, expected_version_ + 1, reason)));
  ++expected_version_;
  progress_.commit_sent = false;
  progress_.writeback = false;
  if (std::exchange(progress_.state_loaded, false) && !std::exchange(progress_.state_written, std::string()).empty() &&
      !session_->optimizer_slab().MakeShared()) {
    return Note(absl::InternalError(
        absl::StrCat("commit_parameters job \"", spec().name(), "\": map the optimizer state: ", strerror(errno))));
  }
  return span.Of(absl::OkStatus());
}

}  // namespace shardd
