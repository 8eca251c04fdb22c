// Full parameters: entered by all ranks together, read by all or by rank 0, written where that was asked for.

#include "absl/strings/str_cat.h"
#include "client/c/call_span.h"
#include "client/c/client_job.h"
#include "common/plan/summon.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

bool Same(const FullParamsOptions& a, const FullParamsOptions& b) {
  return a.group == b.group && a.recurse == b.recurse && a.writeback == b.writeback && a.rank0_only == b.rank0_only &&
         a.with_grads == b.with_grads;
}

}  // namespace

absl::Status ClientJob::EnterFullParams(const FullParamsOptions& options) {
  CallSpan span(this, session_.get(), v1::TRACE_CALL_ENTER_FULL_PARAMS, options.group);
  SHARDD_RETURN_IF_ERROR(Live());
  const std::string object = absl::StrCat("enter_full_params job \"", spec().name(), "\": ");
  const WaitFor reason{"enter_full_params", nullptr, "the other ranks' entry"};
  if (progress_.full_params != FullParams::kEntering) {
    if (options.group < 0 && !options.recurse) {
      return absl::InvalidArgumentError(
          absl::StrCat(object, "recurse 0 names no module (got group -1, want one; rank=", rank(), ")"));
    }
    if (plan_.cut_over_nodes) {
      return absl::UnimplementedError(
          absl::StrCat(object, "full parameters are not served where they are cut over nodes (got ",
                       v1::Strategy_Name(plan_.config.strategy()), " over ", plan_.nodes(), " nodes; rank=", rank(),
                       "); read shards, or use STRATEGY_HYBRID_SHARD"));
    }
    if (expected_version_ == 0) {
      return absl::FailedPreconditionError(absl::StrCat(object, "the parameters have no values yet (version 0; rank=",
                                                        rank(), "); call shardd_commit_parameters first"));
    }
    if (options.with_grads && (plan_.memory.gradients_bytes == 0 || progress_.backward_open)) {
      return absl::FailedPreconditionError(
          absl::StrCat(object, "with_grads: ",
                       progress_.backward_open ? "gradients were submitted in a backward that is not closed (rank="
                                               : "no parameter of the job is trained (rank=",
                       rank(), progress_.backward_open ? "); call shardd_backward_done first" : ")"));
    }
    SHARDD_RETURN_IF_ERROR(Note(session_->WaitSpace(1, reason)));
    CommandRecord record = {};
    SHARDD_ASSIGN_OR_RETURN(record.done, GiveBack(reason));
    SHARDD_RETURN_IF_ERROR(ApplyToAll(HandleEvent::kEnterFullParams));
    record.opcode = Opcode::kEnterFullParams;
    record.group = options.group;
    record.flags = (options.writeback ? kWriteback : 0) | (options.rank0_only ? kRank0Only : 0) |
                   (options.with_grads ? kWithGrads : 0) | (options.recurse ? 0 : kNotRecurse);
    SHARDD_RETURN_IF_ERROR(Note(session_->Send(record, /*act=*/true, reason)));
    progress_.full_params = FullParams::kEntering;
    progress_.full = options;
    progress_.summoned = SummonedParams(spec(), plan_, options.group, options.recurse);
    progress_.writeback = options.writeback;
    ++progress_.full_params_entered;
  } else if (!Same(options, progress_.full)) {
    return absl::FailedPreconditionError(absl::StrCat(
        object, "it was asked for with another writeback, rank0_only, with_grads, recurse or group (rank=", rank(),
        ")"));
  }
  const DaemonPage& page = session_->daemon_page().page();
  SHARDD_RETURN_IF_ERROR(Note(session_->Wait(page.full_params, progress_.full_params_entered, reason)));
  SHARDD_RETURN_IF_ERROR(Note(session_->Wait(page.version, expected_version_, reason)));
  if (options.with_grads || options.writeback) {  // the word is there; what it brings follows on the stream
    SHARDD_ASSIGN_OR_RETURN(
        const absl::optional<v1::SessionEvent::FullParams> entered,
        session_->stream().WaitFullParams(progress_.full_params_entered, absl::Now() + options_.timeout, interrupt_));
    const auto masks = static_cast<size_t>(MaskBytes(static_cast<int64_t>(plan_.params.size())));
    const bool refused = entered.has_value() && entered->code() != 0;
    if (!entered.has_value() || (!refused && options.with_grads && entered->present().size() != masks)) {
      SHARDD_RETURN_IF_ERROR(Live());
      return absl::DeadlineExceededError(absl::StrCat(object, "what became of it did not come within ",
                                                      absl::FormatDuration(options_.timeout), " (rank=", rank(), ")"));
    }
    if (refused) {  // on all ranks; they go on as before
      progress_.full_params = FullParams::kOutside;
      progress_.writeback = false;
      SHARDD_RETURN_IF_ERROR(ApplyToAll(HandleEvent::kLeaveFullParams));
      return absl::Status(static_cast<absl::StatusCode>(entered->code()),
                          absl::StrCat(object, entered->message(), " (rank=", rank(), ")"));
    }
    progress_.gradients_there = entered->present();
    progress_.has_gradients = progress_.has_gradients || (options.writeback && options.with_grads);
  }
  progress_.full_params = FullParams::kInside;
  return span.Of(absl::OkStatus());
}

bool ClientJob::Gives(int index) const {
  return progress_.full_params == FullParams::kInside && (rank() == 0 || !progress_.full.rank0_only) &&
         progress_.summoned[static_cast<size_t>(index)];
}

const void* ClientJob::FullParameterData(int index) const { return Gives(index) ? StoredAt(index, 0) : nullptr; }

const void* ClientJob::FullGradientData(int index) const {
  const auto* there = reinterpret_cast<const uint8_t*>(progress_.gradients_there.data());
  return Gives(index) && progress_.full.with_grads && MaskBit(there, index) ? GradientAt(index, 0) : nullptr;
}

absl::Status ClientJob::LeaveFullParams() {
  CallSpan span(this, session_.get(), v1::TRACE_CALL_LEAVE_FULL_PARAMS);
  SHARDD_RETURN_IF_ERROR(Live());
  if (pass_copies() && progress_.wants_window) {
    return span.Of(AwaitOthersLeave());
  }
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
  SHARDD_RETURN_IF_ERROR(Note(session_->WaitSpace(2, reason)));
  CommandRecord record = {};
  SHARDD_ASSIGN_OR_RETURN(record.done, GiveBack(reason));
  SHARDD_RETURN_IF_ERROR(ApplyToAll(HandleEvent::kLeaveFullParams));
  record.opcode = Opcode::kLeaveFullParams;
  SHARDD_RETURN_IF_ERROR(Note(session_->Send(record, /*act=*/true, reason)));
  progress_.full_params = FullParams::kOutside;
  if (!pass_copies()) {
    return span.Of(absl::OkStatus());
  }
  // From here on the program may store into what others, perhaps, still read.
  record = {};
  record.opcode = Opcode::kOpenWindow;
  SHARDD_RETURN_IF_ERROR(Note(session_->Send(record, /*act=*/true, reason)));
  ++progress_.windows;
  progress_.wants_window = true;
  return span.Of(AwaitOthersLeave());
}

absl::Status ClientJob::AwaitOthersLeave() {
  SHARDD_RETURN_IF_ERROR(Note(session_->Wait(session_->daemon_page().page().windows, progress_.windows,
                                             {"leave_full_params", nullptr, "all ranks outside of full parameters"})));
  progress_.wants_window = false;
  return absl::OkStatus();
}

}  // namespace shardd
