#include "client/c/job/full_params.h"

#include "absl/strings/str_cat.h"
#include "client/c/attachment/call_span.h"
#include "client/c/attachment/shards.h"
#include "common/plan/summon.h"
#include "common/status/status_macros.h"

namespace shardd {

void FullParams::Reset() {
  state_ = State::kOutside;
  options_ = FullParamsOptions();
  entered_.clear();
  gradients_there_.clear();
  writeback_ = false;
  entries_ = 0;
}

std::string FullParams::EnterObject() const {
  return absl::StrCat("enter_full_params job \"", attachment_.plan().job(), "\": ");
}

absl::Status FullParams::CheckMayEnter(const FullParamsOptions& options) const {
  const ShardPlan& plan = attachment_.plan().plan();
  const int rank = attachment_.rank();
  if (options.group < 0 && !options.recurse) {
    return absl::InvalidArgumentError(
        absl::StrCat(EnterObject(), "recurse 0 names no module (got group -1, want one; rank=", rank, ")"));
  }
  if (plan.cut_over_nodes && !options.writeback) {
    return absl::UnimplementedError(
        absl::StrCat(EnterObject(), "full parameters are not served where they are cut over nodes (got ",
                     v1::Strategy_Name(plan.config.strategy()), " over ", plan.nodes(), " nodes; rank=", rank,
                     "); read shards, or use STRATEGY_HYBRID_SHARD with shard groups within a node"));
  }
  if (plan.cut_over_nodes && !attachment_.takes_writes_where_cut()) {  // it would end the attempt on all nodes
    return absl::UnimplementedError(
        absl::StrCat(EnterObject(),
                     "this node's daemon is of an older release, which takes no values after the initial "
                     "ones where parameters are cut over nodes (rank=",
                     rank, "); upgrade it, or load before the job is opened"));
  }
  if (attachment_.ledger().expected_version() == 0) {
    return absl::FailedPreconditionError(absl::StrCat(EnterObject(),
                                                      "the parameters have no values yet (version 0; rank=", rank,
                                                      "); call shardd_commit_parameters first"));
  }
  const bool backward_open = gradients_.backward_open();
  if (options.with_grads && (plan.memory.gradients_bytes == 0 || backward_open)) {
    return absl::FailedPreconditionError(
        absl::StrCat(EnterObject(), "with_grads: ",
                     backward_open ? "gradients were submitted in a backward that is not closed (rank="
                                   : "no parameter of the job is trained (rank=",
                     rank, backward_open ? "); call shardd_backward_done first" : ")"));
  }
  return absl::OkStatus();
}

absl::Status FullParams::SendEnter(const FullParamsOptions& options, const WaitFor& reason) {
  SHARDD_RETURN_IF_ERROR(CheckMayEnter(options));
  SHARDD_ASSIGN_OR_RETURN(const std::string stored, options.of_edits ? std::string() : edits_.FindOwn());
  if (!stored.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(EnterObject(), stored, " was written since the last pass (rank=",
                                                      attachment_.rank(), "); call shardd_enter_pass first"));
  }
  SHARDD_ASSIGN_OR_RETURN(CommandRecord record, attachment_.GivingBack(Opcode::kEnterFullParams, 1, reason));
  SHARDD_RETURN_IF_ERROR(handles_.ApplyToAll(HandleEvent::kEnterFullParams));
  record.group = options.group;
  record.flags = (options.writeback ? kWriteback : 0) | (options.rank0_only ? kRank0Only : 0) |
                 (options.with_grads ? kWithGrads : 0) | (options.recurse ? 0 : kNotRecurse) |
                 (options.of_edits ? kEdits : 0);
  SHARDD_RETURN_IF_ERROR(attachment_.Send(record, /*act=*/true, reason));
  state_ = State::kEntering;
  options_ = options;
  const RankPlan& plan = attachment_.plan();
  entered_ = SummonedParams(plan.spec(), plan.plan(), options.group, options.recurse);
  writeback_ = options.writeback;
  ++entries_;
  return absl::OkStatus();
}

absl::Status FullParams::TakeAnswer() {
  SHARDD_ASSIGN_OR_RETURN(const absl::optional<v1::SessionEvent::FullParams> entered,
                          attachment_.session().life().stream().WaitFullParams(
                              entries_, Deadline::In(attachment_.timeout()), attachment_.interrupt()));
  const auto masks = static_cast<size_t>(MaskBytes(static_cast<int64_t>(attachment_.plan().plan().params.size())));
  const bool refused = entered.has_value() && entered->code() != 0;
  if (!entered.has_value() || (!refused && options_.with_grads && entered->present().size() != masks)) {
    SHARDD_RETURN_IF_ERROR(attachment_.Live());
    return absl::DeadlineExceededError(absl::StrCat(EnterObject(), "what became of it did not come within ",
                                                    absl::FormatDuration(attachment_.timeout()),
                                                    " (rank=", attachment_.rank(), ")"));
  }
  if (refused) {  // on all ranks; they go on as before
    state_ = State::kOutside;
    writeback_ = false;
    SHARDD_RETURN_IF_ERROR(handles_.ApplyToAll(HandleEvent::kLeaveFullParams));
    return absl::Status(static_cast<absl::StatusCode>(entered->code()),
                        absl::StrCat(EnterObject(), entered->message(), " (rank=", attachment_.rank(), ")"));
  }
  gradients_there_ = entered->present();
  if (options_.writeback && options_.with_grads) {
    gradients_.MayHaveSome();
  }
  return absl::OkStatus();
}

absl::Status FullParams::Enter(const FullParamsOptions& options) {
  CallSpan span(attachment_, v1::TRACE_CALL_ENTER_FULL_PARAMS, options.group);
  return span.Of(EnterWithin(options));
}

absl::Status FullParams::EnterWithin(const FullParamsOptions& options) {
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  const WaitFor reason{"enter_full_params", nullptr, "the other ranks' entry"};
  if (state_ != State::kEntering) {
    SHARDD_RETURN_IF_ERROR(SendEnter(options, reason));
  } else if (!(options == options_)) {
    return absl::FailedPreconditionError(absl::StrCat(
        EnterObject(), "it was asked for with another writeback, rank0_only, with_grads, recurse or group ",
        "(rank=", attachment_.rank(), ")"));
  }
  const DaemonPage& page = attachment_.page();
  SHARDD_RETURN_IF_ERROR(attachment_.Wait(page.full_params, entries_, reason));
  SHARDD_RETURN_IF_ERROR(attachment_.Wait(page.version, attachment_.ledger().expected_version(), reason));
  if (options.with_grads || options.writeback) {  // the word is there; what it brings follows on the stream
    SHARDD_RETURN_IF_ERROR(TakeAnswer());
  }
  state_ = State::kInside;
  return absl::OkStatus();
}

absl::Status FullParams::CheckNotStored() const {
  SHARDD_ASSIGN_OR_RETURN(const std::string stored, edits_.FindAny());
  if (stored.empty()) {
    return absl::OkStatus();
  }
  absl::Status status = absl::FailedPreconditionError(absl::StrCat(
      "write ", stored, ": written while this rank is inside of full parameters, where others may read it; write ",
      "into the full parameters, with writeback, or outside (rank=", attachment_.rank(), ")"));
  attachment_.Fail(status);
  return status;
}

absl::Status FullParams::CheckEntered(const char* call, int param) const {
  const RankPlan& plan = attachment_.plan();
  const bool others = options_.rank0_only && plan.rank() != 0;
  if (others || !entered_[static_cast<size_t>(param)]) {
    return absl::FailedPreconditionError(
        absl::StrCat(call, " \"", plan.param(param).fqn, "\": ",
                     others ? std::string("rank 0 alone writes (rank0_only")
                            : absl::StrCat("not among the parameters of group \"", plan.group_name(options_.group),
                                           "\" that were entered (recurse ", int{options_.recurse}),
                     "; rank=", plan.rank(), ")"));
  }
  return absl::OkStatus();
}

bool FullParams::Gives(int param) const {
  return state_ == State::kInside && !attachment_.plan().plan().cut_over_nodes &&
         (attachment_.rank() == 0 || !options_.rank0_only) && entered_[static_cast<size_t>(param)];
}

const void* FullParams::ParameterData(int param) const {
  return Gives(param) ? StoredParameterAt(attachment_, param, 0) : nullptr;
}

const void* FullParams::GradientData(int param) const {
  const auto* there = reinterpret_cast<const uint8_t*>(gradients_there_.data());
  return Gives(param) && options_.with_grads && MaskBit(there, param) ? ReducedGradientAt(attachment_, param, 0)
                                                                      : nullptr;
}

absl::Status FullParams::Leave() {
  CallSpan span(attachment_, v1::TRACE_CALL_LEAVE_FULL_PARAMS);
  return span.Of(LeaveWithin());
}

absl::Status FullParams::LeaveWithin() {
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  const bool copies = attachment_.plan().pass_copies();
  if (copies && hand_ins_.requested()) {
    return hand_ins_.AwaitOthersLeave();
  }
  const bool inside = state_ == State::kInside;
  if (!inside || writeback_) {
    return absl::FailedPreconditionError(
        absl::StrCat("leave_full_params job \"", attachment_.plan().job(), "\": ",
                     inside ? "they were entered with writeback and the other ranks wait for this one's commit"
                            : "full parameters are not entered",
                     " (rank=", attachment_.rank(), "); call ",
                     inside ? "shardd_commit_parameters" : "shardd_enter_full_params", " first"));
  }
  SHARDD_RETURN_IF_ERROR(CheckNotStored());
  const WaitFor reason{"leave_full_params", nullptr, "space in the command ring"};
  SHARDD_ASSIGN_OR_RETURN(CommandRecord record, attachment_.GivingBack(Opcode::kLeaveFullParams, 2, reason));
  SHARDD_RETURN_IF_ERROR(handles_.ApplyToAll(HandleEvent::kLeaveFullParams));
  SHARDD_RETURN_IF_ERROR(attachment_.Send(record, /*act=*/true, reason));
  state_ = State::kOutside;
  if (copies) {  // from here on the program may store into what others, perhaps, still read
    SHARDD_RETURN_IF_ERROR(hand_ins_.Request(reason));
    SHARDD_RETURN_IF_ERROR(hand_ins_.AwaitOthersLeave());
  }
  return absl::OkStatus();
}

}  // namespace shardd
