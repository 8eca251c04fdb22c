// Passes and write windows, for jobs whose trainers write their shards.

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/c/call_span.h"
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
  CallSpan span(this, session_.get(), v1::TRACE_CALL_ENTER_PASS);
  SHARDD_RETURN_IF_ERROR(Live());
  SHARDD_RETURN_IF_ERROR(CheckWrites("enter_pass"));
  const WaitFor reason{"enter_pass", nullptr, "all ranks in the pass"};
  if (pass_copies() && progress_.wants_window) {
    SHARDD_RETURN_IF_ERROR(AwaitOthersLeave());  // of an interrupted leave_full_params
  }
  if (!progress_.entering_pass) {
    if (inside_pass()) {
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
    SHARDD_RETURN_IF_ERROR(WaitPassBegun("enter_pass", nullptr));
    SHARDD_RETURN_IF_ERROR(Note(session_->WaitConsumed(progress_.payload_record, reason)));
    SHARDD_RETURN_IF_ERROR(Note(session_->WaitSpace(1, reason)));
    CommandRecord record = {};
    SHARDD_ASSIGN_OR_RETURN(record.done, GiveBack(reason));
    if (std::exchange(progress_.window, false)) {
      (void)session_->SetShardsWritable(false);
    }
    if (watch_writes_) {
      SHARDD_RETURN_IF_ERROR(WriteFaults::Renew());
    }
    state.copy(session_->memory().At<char>(layout_.payload_offset_bytes), state.size());
    session_->memory().page().pass.store(static_cast<uint32_t>(PassWord::kReading), std::memory_order_release);
    record.opcode = Opcode::kEnterPass;
    record.flags = stepped ? kStepped : 0;
    record.arg0 = static_cast<int64_t>(state.size());
    progress_.inside_pass = false;  // of one that was ended by another rank's window
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
  if (pass_copies() && session_->stream_ordered()) {
    SHARDD_RETURN_IF_ERROR(Note(session_->Wait(page.passes_issued, progress_.passes, reason)));
    SHARDD_RETURN_IF_ERROR(Note(session_->WaitInStream(page.passes, progress_.passes, reason)));
    progress_.awaited_version = expected_version_;
  } else {
    SHARDD_RETURN_IF_ERROR(Note(session_->Wait(page.passes, progress_.passes, reason)));
  }
  progress_.entering_pass = false;
  progress_.inside_pass = true;
  progress_.paused = false;
  progress_.written.clear();
  progress_.pass_begins = true;
  if (progress_.entering_stepped) {
    progress_.backwards = 0;
    progress_.last_closed = progress_.has_gradients = false;
  }
  RetireSteps();  // what has come with it, if it has begun
  return span.Of(absl::OkStatus());
}

absl::Status ClientJob::LeavePass() {
  CallSpan span(this, session_.get(), v1::TRACE_CALL_LEAVE_PASS);
  SHARDD_RETURN_IF_ERROR(Live());
  SHARDD_RETURN_IF_ERROR(CheckWrites("leave_pass"));
  if (progress_.paused && !EndPause()) {
    return span.Of(absl::OkStatus());  // it was left by another rank's window
  }
  if (!progress_.inside_pass) {
    return absl::FailedPreconditionError(
        absl::StrCat("leave_pass job \"", spec().name(), "\": the rank is not inside a pass (rank=", rank(), ")"));
  }
  SHARDD_RETURN_IF_ERROR(WaitPassBegun("leave_pass", nullptr));
  CommandRecord record = {};
  record.opcode = Opcode::kLeavePass;
  // Somebody may wait for it with a write.
  SHARDD_RETURN_IF_ERROR(Note(session_->Send(record, /*act=*/true, {"leave_pass", nullptr, "space in the ring"})));
  progress_.inside_pass = false;
  return span.Of(absl::OkStatus());
}

absl::Status ClientJob::PausePass() {
  SHARDD_RETURN_IF_ERROR(Live());
  SHARDD_RETURN_IF_ERROR(CheckWrites("pause_pass"));
  if (!progress_.inside_pass) {
    return absl::FailedPreconditionError(
        absl::StrCat("pause_pass job \"", spec().name(), "\": the rank is not inside a pass (rank=", rank(), ")"));
  }
  progress_.paused = true;
  session_->memory().page().pass.store(static_cast<uint32_t>(PassWord::kPaused), std::memory_order_release);
  return absl::OkStatus();
}

// Async-signal-safe. False: a window was opened meanwhile, and the pass is over.
bool ClientJob::EndPause() {
  progress_.paused = false;
  uint32_t paused = static_cast<uint32_t>(PassWord::kPaused);
  if (session_->memory().page().pass.compare_exchange_strong(paused, static_cast<uint32_t>(PassWord::kReading))) {
    return true;
  }
  progress_.inside_pass = false;
  if (progress_.written.empty()) {
    progress_.written = "a parameter (by another rank)";
  }
  return false;
}

bool ClientJob::inside_pass() const {
  return progress_.inside_pass && !(progress_.paused && session_ != nullptr &&
                                    session_->memory().page().pass.load(std::memory_order_acquire) ==
                                        static_cast<uint32_t>(PassWord::kOvertaken));
}

absl::Status ClientJob::ResumePass() {
  SHARDD_RETURN_IF_ERROR(Live());
  SHARDD_RETURN_IF_ERROR(CheckWrites("resume_pass"));
  return ReadAgain(absl::StrCat("resume_pass job \"", spec().name(), "\""));
}

absl::Status ClientJob::ReadAgain(absl::string_view what) {
  if (progress_.inside_pass && (!progress_.paused || EndPause())) {
    return absl::OkStatus();
  }
  if (!progress_.written.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        what, ": ", progress_.written, " was written after the forward of this pass, whose backward would see other ",
        "values (rank=", rank(), "); write after the backward"));
  }
  return absl::FailedPreconditionError(
      absl::StrCat(what, ": the rank is outside of a pass (rank=", rank(), "); call shardd_enter_pass first"));
}

absl::Status ClientJob::OpenWindow() {
  CallSpan span(this, session_.get(), v1::TRACE_CALL_OPEN_WINDOW);
  SHARDD_RETURN_IF_ERROR(Live());
  SHARDD_RETURN_IF_ERROR(CheckWrites("open_window"));
  if (pass_copies() && progress_.wants_window) {
    SHARDD_RETURN_IF_ERROR(AwaitOthersLeave());  // of an interrupted leave_full_params
  }
  const bool may_store = pass_copies() && !progress_.entering_pass && progress_.full_params == FullParams::kOutside;
  if (progress_.window || may_store) {
    return span.Of(absl::OkStatus());
  }
  if (inside_pass() || progress_.entering_pass) {
    return absl::FailedPreconditionError(absl::StrCat("open_window job \"", spec().name(),
                                                      "\": the rank is inside a pass (rank=", rank(),
                                                      "); call shardd_leave_pass first"));
  }
  if (progress_.full_params != FullParams::kOutside) {
    return absl::FailedPreconditionError(absl::StrCat("open_window job \"", spec().name(),
                                                      "\": the rank is inside of full parameters (rank=", rank(),
                                                      "); call shardd_leave_full_params first"));
  }
  const WaitFor reason{"open_window", nullptr, "all ranks outside of the pass"};
  if (!progress_.wants_window) {
    CommandRecord record = {};
    record.opcode = Opcode::kOpenWindow;
    progress_.inside_pass = progress_.paused = false;
    SHARDD_RETURN_IF_ERROR(Note(session_->Send(record, /*act=*/true, reason)));
    ++progress_.windows;
    progress_.wants_window = true;
  }
  SHARDD_RETURN_IF_ERROR(Note(session_->Wait(session_->daemon_page().page().windows, progress_.windows, reason)));
  progress_.wants_window = false;
  progress_.window = true;
  if (!session_->SetShardsWritable(true)) {
    return absl::InternalError(absl::StrCat("open_window job \"", spec().name(), "\": mprotect (rank=", rank(), ")"));
  }
  return span.Of(absl::OkStatus());
}

absl::Status ClientJob::WatchWrites(bool watch) {
  SHARDD_RETURN_IF_ERROR(Live());
  if (session_->on_device() && pass_copies()) {
    return absl::OkStatus();  // stores need nobody's leave
  }
  if (watch && session_->on_device()) {
    return absl::UnimplementedError(absl::StrCat("watch_writes job \"", spec().name(), "\": its memory lies on ",
                                                 device_, ", where no store can be caught (rank=", rank(),
                                                 "); do not write to what is read-only"));
  }
  watch_writes_ = watch;
  if (!watch) {
    WriteFaults::Forget(this);
    return absl::OkStatus();
  }
  return WatchSlabs();
}

absl::Status ClientJob::WatchSlabs() {
  int which = 0;
  for (const MappedSlab* slab : session_->watched_slabs()) {
    if (slab->data() != nullptr) {
      SHARDD_RETURN_IF_ERROR(WriteFaults::Watch(this, which, slab->data(), slab->size_bytes()));
    }
    ++which;
  }
  return absl::OkStatus();
}

std::string ClientJob::ParameterAt(const void* address) const {
  for (const ParamPlan& param : plan_.params) {
    const FlatParamPlan& flat = flat_of(param);
    const auto holds = [&](const MappedSlab& slab, int64_t offset_bytes, int64_t element_bytes) {
      if (slab.data() == nullptr || offset_bytes < 0) {
        return false;  // the group has none there
      }
      const char* begin = slab.At<const char>(offset_bytes) + param.offset * element_bytes;
      return address >= begin && address < begin + param.numel * element_bytes;
    };
    if (holds(session_->shards_slab(), flat.shards_offset_bytes, DTypeSizeBytes(param.dtype))) {
      return absl::StrCat("parameter \"", param.fqn, "\"");
    }
    if (holds(session_->parameters_slab(), flat.params_offset_bytes, DTypeSizeBytes(flat.unsharded_dtype))) {
      return absl::StrCat("unsharded parameter \"", param.fqn, "\"");
    }
    for (int state = 0; state < plan_.optimizer_states && flat.optimizer_offset_bytes >= 0; ++state) {
      if (holds(session_->optimizer_slab(), flat.optimizer_offset_bytes + state * flat.StateStrideBytes(),
                DTypeSizeBytes(v1::DTYPE_FLOAT32))) {
        return absl::StrCat("optimizer state of \"", param.fqn, "\"");
      }
    }
  }
  return "padding";
}

// Why the store may not be; OK: it may, and the window is open.
absl::Status ClientJob::AllowWrite(const void* address) {
  const auto in = [address](const MappedSlab& slab) {
    const auto* begin = static_cast<const char*>(slab.data());
    return begin != nullptr && address >= begin && address < begin + slab.size_bytes();
  };
  const auto refuse = [&](absl::string_view why) {
    return absl::FailedPreconditionError(
        absl::StrCat("write ", ParameterAt(address), ": ", why, " (rank=", rank(), ")"));
  };
  if (in(session_->parameters_slab())) {
    return refuse("its cast copy is made by the daemon; reshard, and write the shard");
  }
  if (plan_.config.trainers_never_write()) {
    return refuse("the job was opened with trainers that never write (got trainersNeverWrite true, want false)");
  }
  if (progress_.entering_pass || (progress_.inside_pass && !progress_.paused)) {
    return refuse(
        "written inside a pass, while other ranks may read it; write between a backward, or a forward without "
        "gradients, and the next forward");
  }
  if (progress_.full_params != FullParams::kOutside) {
    return refuse(
        "written while this rank is inside of full parameters, where others may read it; write into the full "
        "parameters, with writeback, or outside");
  }
  session_->set_in_signal(true);
  absl::Status status;
  if (progress_.inside_pass) {
    progress_.written = ParameterAt(address);
    status = LeavePass();
  }
  if (status.ok()) {
    status = OpenWindow();
  }
  session_->set_in_signal(false);
  return status;
}

bool ClientJob::OnWriteFault(const void* address) {
  if (progress_.window && session_->WindowCovers(address)) {
    return true;  // another thread's fault has opened it
  }
  if (const MappedSlab& state = session_->optimizer_slab();
      plan_.config.optimizer().kind() != v1::OPTIMIZER_KIND_TRAINER && state.data() != nullptr &&
      address >= state.data() && address < state.At<const char>(state.size_bytes())) {
    // The daemon's. Checkpoints are read into it in place, and then loaded: this process sees what it stored until
    // then.
    if (progress_.state_written.empty()) {
      progress_.state_written = ParameterAt(address);
    }
    return state.MakePiecePrivate(address);
  }
  absl::Status status = AllowWrite(address);
  if (status.ok()) {
    return true;
  }
  // The store cannot be undone and nobody may see it: it goes to a copy of this process, and the next call says why.
  for (const MappedSlab* slab : session_->watched_slabs()) {
    if (slab->data() != nullptr && !slab->MakePrivate()) {
      return false;
    }
  }
  if (failure_.ok()) {
    failure_ = std::move(status);
  }
  return true;
}

void* ClientJob::OptimizerStateData(int index, int state) {
  const ParamPlan& param = this->param(index);
  const FlatParamPlan& flat = flat_of(param);
  if (session_ == nullptr || flat.optimizer_offset_bytes < 0 || state < 0 || state >= plan_.optimizer_states) {
    return nullptr;
  }
  const bool mapped = session_->optimizer_slab().data() != nullptr;
  char* const base = session_->optimizer();
  if (base == nullptr) {
    return nullptr;
  }
  if (!mapped && watch_writes_) {
    (void)WatchSlabs();
  }
  return base + copy_of(plan_.optimizer_copies) * plan_.optimizer_stride_bytes + flat.optimizer_offset_bytes +
         state * flat.StateStrideBytes() + param.offset * DTypeSizeBytes(v1::DTYPE_FLOAT32);
}

}  // namespace shardd
