// Passes and write windows, for jobs whose trainers write their shards.

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/c/client_job.h"
#include "client/c/write_faults.h"
#include "common/status/status_macros.h"

namespace shardd {

ClientJob::~ClientJob() { WriteFaults::Forget(this); }

absl::Status ClientJob::CheckWrites(const char* call) const {
  if (plan_.config.trainers_never_write()) {
    return absl::FailedPreconditionError(
        absl::StrCat(call, " job \"", spec().name(),
                     "\": its trainers never write (got trainersNeverWrite true, want false; rank=", rank(), ")"));
  }
  if (expected_version_ == 0) {
    return absl::FailedPreconditionError(absl::StrCat(call, " job \"", spec().name(),
                                                      "\": the parameters have no values yet (version 0; rank=", rank(),
                                                      "); call shardd_commit_parameters first"));
  }
  return absl::OkStatus();
}

absl::Status ClientJob::EnterPass(bool stepped, absl::string_view state) {
  SHARDD_RETURN_IF_ERROR(Live());
  SHARDD_RETURN_IF_ERROR(CheckWrites("enter_pass"));
  const WaitFor reason{"enter_pass", nullptr, "all ranks in the pass"};
  if (!progress_.entering_pass) {
    if (progress_.inside_pass) {
      return absl::FailedPreconditionError(absl::StrCat("enter_pass job \"", spec().name(),
                                                        "\": the rank is inside one (rank=", rank(),
                                                        "); call shardd_leave_pass first"));
    }
    if (static_cast<int64_t>(state.size()) > kMaxTrainerStateBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("enter_pass job \"", spec().name(), "\": trainer state is too large (got ", state.size(),
                       " bytes, want at most ", kMaxTrainerStateBytes, "; rank=", rank(), ")"));
    }
    if (stepped && progress_.backward_open) {
      return absl::FailedPreconditionError(absl::StrCat("enter_pass job \"", spec().name(),
                                                        "\": a backward is not closed (rank=", rank(),
                                                        "); call shardd_backward_done first"));
    }
    SHARDD_RETURN_IF_ERROR(Note(session_->WaitConsumed(progress_.payload_record, reason)));
    if (std::exchange(progress_.window, false)) {
      (void)session_->shards_slab().SetWritable(false);
    }
    if (stepped) {
      state.copy(session_->memory().At<char>(layout_.payload_offset_bytes), state.size());
    }
    CommandRecord record = {};
    record.opcode = Opcode::kEnterPass;
    record.flags = stepped ? kStepped : 0;
    record.arg0 = stepped ? static_cast<int64_t>(state.size()) : 0;
    SHARDD_RETURN_IF_ERROR(Note(session_->Send(record, /*act=*/true, reason)));
    progress_.payload_record = session_->submitted();
    progress_.half_record[0] = progress_.half_record[1] = session_->submitted();
    progress_.half_used_bytes = 0;
    ++progress_.passes;
    progress_.entering_pass = true;
    progress_.entering_stepped = stepped;
    progress_.entering_state = std::string(state);
  }
  const DaemonPage& page = session_->daemon_page().page();
  SHARDD_RETURN_IF_ERROR(Note(session_->Wait(page.passes, progress_.passes, reason)));
  RetireSteps();
  progress_.entering_pass = false;
  progress_.inside_pass = true;
  expected_version_ = session_->SequenceOf(page.version);
  if (progress_.entering_stepped) {
    ++committed_step_;
    trainer_state_ = std::move(progress_.entering_state);
    progress_.backwards = 0;
    progress_.last_closed = false;
  }
  return absl::OkStatus();
}

absl::Status ClientJob::LeavePass() {
  SHARDD_RETURN_IF_ERROR(Live());
  SHARDD_RETURN_IF_ERROR(CheckWrites("leave_pass"));
  if (!progress_.inside_pass) {
    return absl::FailedPreconditionError(
        absl::StrCat("leave_pass job \"", spec().name(), "\": the rank is not inside a pass (rank=", rank(), ")"));
  }
  CommandRecord record = {};
  record.opcode = Opcode::kLeavePass;
  // Somebody may wait for it with a write.
  SHARDD_RETURN_IF_ERROR(Note(session_->Send(record, /*act=*/true, {"leave_pass", nullptr, "space in the ring"})));
  progress_.inside_pass = false;
  return absl::OkStatus();
}

absl::Status ClientJob::OpenWindow() {
  SHARDD_RETURN_IF_ERROR(Live());
  SHARDD_RETURN_IF_ERROR(CheckWrites("open_window"));
  if (progress_.window) {
    return absl::OkStatus();
  }
  if (progress_.inside_pass || progress_.entering_pass) {
    return absl::FailedPreconditionError(absl::StrCat("open_window job \"", spec().name(),
                                                      "\": the rank is inside a pass (rank=", rank(),
                                                      "); call shardd_leave_pass first"));
  }
  const WaitFor reason{"open_window", nullptr, "all ranks outside of the pass"};
  if (!progress_.wants_window) {
    CommandRecord record = {};
    record.opcode = Opcode::kOpenWindow;
    SHARDD_RETURN_IF_ERROR(Note(session_->Send(record, /*act=*/true, reason)));
    ++progress_.windows;
    progress_.wants_window = true;
  }
  SHARDD_RETURN_IF_ERROR(Note(session_->Wait(session_->daemon_page().page().windows, progress_.windows, reason)));
  progress_.wants_window = false;
  progress_.window = true;
  if (!session_->shards_slab().SetWritable(true)) {
    return absl::InternalError(absl::StrCat("open_window job \"", spec().name(), "\": mprotect (rank=", rank(), ")"));
  }
  return absl::OkStatus();
}

absl::Status ClientJob::WatchWrites(bool watch) {
  SHARDD_RETURN_IF_ERROR(Live());
  if (plan_.config.trainers_never_write()) {
    return absl::FailedPreconditionError(
        absl::StrCat("watch_writes job \"", spec().name(), "\": its trainers never write (rank=", rank(), ")"));
  }
  watch_writes_ = watch;
  if (!watch) {
    WriteFaults::Forget(this);
    return absl::OkStatus();
  }
  return WriteFaults::Watch(this, session_->shards_slab().data(), session_->shards_slab().size_bytes());
}

bool ClientJob::OnWriteFault(const void* address) {
  if (progress_.window) {
    return true;  // another thread's fault has opened it
  }
  absl::Status status = absl::FailedPreconditionError("");
  if (!progress_.inside_pass && !progress_.entering_pass) {
    session_->set_in_signal(true);
    status = OpenWindow();
    session_->set_in_signal(false);
    if (status.ok()) {
      return true;
    }
  }
  // The store cannot be undone and nobody may see it: it goes to a copy of this process, and the next call says why.
  if (!session_->shards_slab().MakePrivate()) {
    return false;
  }
  if (status.message().empty()) {
    const int64_t offset = (static_cast<const char*>(address) - session_->shards()) % plan_.shards_stride_bytes;
    std::string name = "?";
    for (const ParamPlan& param : plan_.params) {
      const FlatParamPlan& flat = flat_of(param);
      const int64_t element = DTypeSizeBytes(param.dtype);
      const int64_t begin = flat.shards_offset_bytes + param.offset * element;
      if (offset >= begin && offset < begin + param.numel * element) {
        name = param.fqn;
      }
    }
    status = absl::FailedPreconditionError(absl::StrCat(
        "write parameter \"", name, "\": written inside a pass, while other ranks may read it (rank=", rank(),
        "); write between the backward and the next forward"));
  }
  if (failure_.ok()) {
    failure_ = status;
  }
  return true;
}

void* ClientJob::OptimizerStateData(int index, int state) const {
  const ParamPlan& param = this->param(index);
  const FlatParamPlan& flat = flat_of(param);
  if (session_ == nullptr || session_->optimizer() == nullptr || flat.optimizer_offset_bytes < 0 || state < 0 ||
      state >= plan_.optimizer_states) {
    return nullptr;
  }
  return session_->optimizer() + copy_of(plan_.optimizer_copies) * plan_.optimizer_stride_bytes +
         flat.optimizer_offset_bytes + state * flat.StateStrideBytes() +
         param.offset * DTypeSizeBytes(v1::DTYPE_FLOAT32);
}

}  // namespace shardd
