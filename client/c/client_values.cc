#include <string.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
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

absl::Status ClientJob::WriteChunk(int index, const char* data, int64_t first, int64_t numel) {
  CommandRecord record = {};
  SHARDD_ASSIGN_OR_RETURN(record.arg2, Stage(data, numel * DTypeSizeBytes(param(index).dtype)));
  record.opcode = Opcode::kWriteParameters;
  record.group = index;
  record.arg0 = first;
  record.arg1 = numel;
  const WaitFor reason{"write_parameter", nullptr, "space in the command ring"};
  SHARDD_RETURN_IF_ERROR(Note(session_->Send(record, /*act=*/true, reason)));
  progress_.half_record[progress_.half] = session_->submitted();
  progress_.payload_record = session_->submitted();
  return absl::OkStatus();
}

absl::Status ClientJob::WriteParameter(int index, const void* data, int64_t first, int64_t numel) {
  SHARDD_RETURN_IF_ERROR(Live());
  const ParamPlan& param = this->param(index);
  if (first < 0 || numel < 0 || first > param.numel || numel > param.numel - first) {
    return absl::InvalidArgumentError(absl::StrCat("write_parameter \"", param.fqn, "\": range is outside of it (got [",
                                                   first, ", ", first, " + ", numel, "), want within [0, ", param.numel,
                                                   "); rank=", rank(), ")"));
  }
  if (numel > 0 && data == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("write_parameter \"", param.fqn, "\": data is NULL"));
  }
  const bool initial = expected_version_ == 0;
  if (progress_.commit_sent || !(initial || (progress_.full_params == FullParams::kInside && progress_.writeback))) {
    return absl::FailedPreconditionError(absl::StrCat(
        "write_parameter \"", param.fqn, "\": parameters cannot be written now (version ", expected_version_,
        "; rank=", rank(), "); write before the first shardd_commit_parameters, or between ",
        "shardd_enter_full_params with writeback and shardd_commit_parameters"));
  }
  const int64_t element_bytes = DTypeSizeBytes(param.dtype);
  const int64_t chunk_numel = kHalfBytes / element_bytes;
  const char* bytes = static_cast<const char*>(data);
  for (int64_t done = 0; done < numel; done += chunk_numel) {
    const int64_t count = std::min(chunk_numel, numel - done);
    SHARDD_RETURN_IF_ERROR(WriteChunk(index, bytes + done * element_bytes, first + done, count));
  }
  return absl::OkStatus();
}

absl::Status ClientJob::CommitParameters() {
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
  return absl::OkStatus();
}

absl::Status ClientJob::EnterFullParams(bool writeback) {
  SHARDD_RETURN_IF_ERROR(Live());
  const WaitFor reason{"enter_full_params", nullptr, "the other ranks' entry"};
  if (progress_.full_params != FullParams::kEntering) {
    if (expected_version_ == 0) {
      return absl::FailedPreconditionError(absl::StrCat(
          "enter_full_params job \"", spec().name(), "\": the parameters have no values yet (version 0; rank=", rank(),
          "); call shardd_commit_parameters first"));
    }
    SHARDD_RETURN_IF_ERROR(Note(session_->WaitSpace(1, reason)));
    SHARDD_RETURN_IF_ERROR(ApplyToAll(HandleEvent::kEnterFullParams));
    CommandRecord record = {};
    record.opcode = Opcode::kEnterFullParams;
    record.flags = writeback ? kWriteback : 0;
    SHARDD_RETURN_IF_ERROR(Note(session_->Send(record, /*act=*/true, reason)));
    progress_.full_params = FullParams::kEntering;
    progress_.writeback = writeback;
    ++progress_.full_params_entered;
  } else if (writeback != progress_.writeback) {
    return absl::FailedPreconditionError(
        absl::StrCat("enter_full_params job \"", spec().name(), "\": it was asked for with another writeback (got ",
                     int{writeback}, ", want ", int{progress_.writeback}, "; rank=", rank(), ")"));
  }
  const DaemonPage& page = session_->daemon_page().page();
  SHARDD_RETURN_IF_ERROR(Note(session_->Wait(page.full_params, progress_.full_params_entered, reason)));
  SHARDD_RETURN_IF_ERROR(Note(session_->Wait(page.version, expected_version_, reason)));
  progress_.full_params = FullParams::kInside;
  return absl::OkStatus();
}

const void* ClientJob::FullParameterData(int index) const {
  if (progress_.full_params != FullParams::kInside) {
    return nullptr;
  }
  const ParamPlan& param = this->param(index);
  const FlatParamPlan& flat = flat_of(param);
  return session_->shards() + flat.shards_offset_bytes + param.offset * DTypeSizeBytes(flat.dtype);
}

absl::Status ClientJob::LeaveFullParams() {
  SHARDD_RETURN_IF_ERROR(Live());
  if (progress_.full_params != FullParams::kInside || progress_.writeback) {
    return absl::FailedPreconditionError(absl::StrCat(
        "leave_full_params job \"", spec().name(), "\": ",
        progress_.full_params != FullParams::kInside
            ? "full parameters are not entered"
            : "they were entered with writeback and the other ranks wait for this one's commit",
        " (rank=", rank(), "); call ",
        progress_.full_params != FullParams::kInside ? "shardd_enter_full_params" : "shardd_commit_parameters",
        " first"));
  }
  const WaitFor reason{"leave_full_params", nullptr, "space in the command ring"};
  SHARDD_RETURN_IF_ERROR(Note(session_->WaitSpace(1, reason)));
  SHARDD_RETURN_IF_ERROR(ApplyToAll(HandleEvent::kLeaveFullParams));
  CommandRecord record = {};
  record.opcode = Opcode::kLeaveFullParams;
  SHARDD_RETURN_IF_ERROR(Note(session_->Send(record, /*act=*/true, reason)));
  progress_.full_params = FullParams::kOutside;
  return absl::OkStatus();
}

}  // namespace shardd
