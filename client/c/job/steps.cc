#include "client/c/job/steps.h"

#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/c/attachment/call_span.h"
#include "common/plan/optimizer_kinds.h"
#include "common/status/status_macros.h"
#include "common/tensor/norm.h"

namespace shardd {
namespace {

constexpr char kCommitIsLate[] =
    "; the daemon may still be updating (large matrices of Muon take it minutes): call shardd_wait_step again to wait "
    "longer, or raise timeout_ms (SHARDD_TIMEOUT_MS)";

}  // namespace

void Steps::Reset() {
  last_step_ = -1;
  parts_ = parts_made_ = 0;
  last_version_ = 0;
}

absl::Status Steps::Check(const v1::Step& step, absl::string_view state) const {
  const ShardPlan& plan = attachment_.plan().plan();
  const std::string object = absl::StrCat("step job \"", attachment_.plan().job(), "\": ");
  const int want_groups = OptimizerGroups(plan.config.optimizer());
  if (step.groups_size() != want_groups) {
    return absl::InvalidArgumentError(absl::StrCat(object, "wrong number of optimizer groups (got ", step.groups_size(),
                                                   ", want ", want_groups, "; rank=", attachment_.rank(), ")"));
  }
  for (int i = 0; i < want_groups; ++i) {
    // The daemon checks the same and more (all ranks equal); there a mistake costs every rank the step, here only this
    // call.
    if (absl::Status status = CheckHyperParameters(plan.config.optimizer(), i, step.groups(i)); !status.ok()) {
      return absl::Status(status.code(), absl::StrCat(object, status.message()));
    }
  }
  if (static_cast<int64_t>(state.size()) > kMaxTrainerStateBytes) {
    return absl::InvalidArgumentError(absl::StrCat(object, "trainer state is too large (got ", state.size(),
                                                   " bytes, want at most ", kMaxTrainerStateBytes,
                                                   "; rank=", attachment_.rank(), ")"));
  }
  if (!(step.max_grad_norm() >= 0)) {
    return absl::InvalidArgumentError(absl::StrCat(object, "max_grad_norm is out of range (got ", step.max_grad_norm(),
                                                   ", want 0 or more; rank=", attachment_.rank(), ")"));
  }
  if (step.norm_type() != 0 && !Norm::IsOrder(step.norm_type())) {
    return absl::InvalidArgumentError(
        absl::StrCat(object, "norm_type is out of range (got ", step.norm_type(),
                     ", want above 0, infinity included, or 0 for 2; rank=", attachment_.rank(), ")"));
  }
  if (!(step.loss_scale() >= 0) || std::isinf(step.loss_scale())) {
    return absl::InvalidArgumentError(absl::StrCat(object, "loss_scale is out of range (got ", step.loss_scale(),
                                                   ", want finite, 0 or more; rank=", attachment_.rank(), ")"));
  }
  if (attachment_.ledger().expected_version() == 0) {
    return absl::FailedPreconditionError(absl::StrCat(object, "the parameters have no values yet (version 0; rank=",
                                                      attachment_.rank(), "); call shardd_commit_parameters first"));
  }
  if (gradients_.backward_open()) {
    return absl::FailedPreconditionError(
        absl::StrCat(object, "gradients were submitted in a backward that is not closed (", gradients_.backwards(),
                     " backwards closed; rank=", attachment_.rank(), "); call shardd_backward_done first"));
  }
  return absl::OkStatus();
}

absl::Status Steps::CheckParts(const v1::Step& step) const {
  const ShardPlan& plan = attachment_.plan().plan();
  const std::string object = absl::StrCat("step job \"", attachment_.plan().job(), "\": ");
  if (!HasSeveralOptimizers(plan.config.optimizer())) {
    return absl::InvalidArgumentError(absl::StrCat(object, "one optimizer steps all of the model at once (got a part, ",
                                                   "or groups that it leaves; rank=", attachment_.rank(),
                                                   "); give optimizer.groups kinds of their own"));
  }
  const char* const where = attachment_.memory().on_device() || plan.config.offload() == v1::OFFLOAD_HOST ? "on GPUs"
                            : plan.config.pass_copies() ? "where passes read copies (passCopies)"
                                                        : nullptr;
  return where == nullptr || !step.part()
             ? absl::OkStatus()
             : absl::FailedPreconditionError(
                   absl::StrCat(object, "several optimizers of one model step in parts, which are not served ", where,
                                " (rank=", attachment_.rank(),
                                "); use one optimizer with several param groups, or let them step in the trainers"));
}

// What is handed in beside a part would be taken back without it, or the other way round.
absl::Status Steps::CheckNotEdited(bool part) {
  if ((!part && parts_ == 0) || !attachment_.plan().trainers_write() || attachment_.plan().pass_copies()) {
    return absl::OkStatus();
  }
  // An error within a pass: who stores while the rank reads is told by HandInEdits.
  const absl::StatusOr<bool> edited = passes_.HasEdits();
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  return edited.value_or(false)
             ? absl::FailedPreconditionError(
                   absl::StrCat("step job \"", attachment_.plan().job(), "\": parameters were edited between the ",
                                parts_ == 0 ? "forward and the step of one of several optimizers"
                                            : "steps of two optimizers of one model",
                                " (rank=", attachment_.rank(),
                                "); edit them behind the last step, or let the optimizers step in the trainers"))
             : absl::OkStatus();
}

bool Steps::OnlyCommits(const v1::Step& step) const {
  return parts_ > 0 && !step.part() && step.left_groups_size() == step.groups_size();
}

absl::Status Steps::Send(v1::Step step, absl::string_view state) {
  CallSpan span(attachment_, v1::TRACE_CALL_STEP);
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  SHARDD_RETURN_IF_ERROR(Check(step, state));
  const auto object = [this] { return absl::StrCat("step job \"", attachment_.plan().job(), "\": "); };
  if (step.part() || step.left_groups_size() > 0) {
    SHARDD_RETURN_IF_ERROR(CheckParts(step));
  }
  if (attachment_.plan().trainers_optimize()) {
    return absl::FailedPreconditionError(absl::StrCat(object(),
                                                      "its optimizer runs in the trainers (rank=", attachment_.rank(),
                                                      "); write the shards, shardd_enter_pass commits it"));
  }
  if (parts_ > parts_made_) {  // an interrupted call has not waited for it
    SHARDD_RETURN_IF_ERROR(Wait().status());
  }
  const bool part = step.part();
  const bool only_commits = OnlyCommits(step);
  step.set_trainer_state(state.data(), state.size());
  const std::string payload = step.SerializeAsString();
  if (static_cast<int64_t>(payload.size()) > kStepPayloadBytes) {
    return absl::InvalidArgumentError(absl::StrCat(object(), "message is too large (got ", payload.size(),
                                                   " bytes, want at most ", kStepPayloadBytes,
                                                   "; rank=", attachment_.rank(), "); use fewer optimizer groups"));
  }
  SHARDD_RETURN_IF_ERROR(attachment_.WaitCommitted("step", nullptr));
  if (!only_commits) SHARDD_RETURN_IF_ERROR(CheckNotEdited(part));
  // Before the daemon updates it. What was stored since a part was made is not in the way of a step that updates
  // nothing: the pages are as the shards will be, and the next pass hands them in.
  SHARDD_RETURN_IF_ERROR(only_commits ? passes_.StepEnded() : passes_.HandInEdits("step"));
  const WaitFor reason{"step", nullptr, "the daemon's copy of what was sent before"};
  SHARDD_RETURN_IF_ERROR(staging_.WaitTaken(reason));
  SHARDD_ASSIGN_OR_RETURN(CommandRecord record, attachment_.GivingBack(Opcode::kStep, 1, reason));
  SHARDD_RETURN_IF_ERROR(handles_.ApplyToAll(HandleEvent::kStep));
  staging_.PutMessage(payload);
  record.arg0 = static_cast<int64_t>(payload.size());
  if (!only_commits) hand_ins_.End();  // before the daemon may update
  SHARDD_RETURN_IF_ERROR(attachment_.Send(record, /*act=*/true, reason));
  attachment_.session().stream_waits().NeedSums(gradients_.backwards_closed());
  staging_.MessageSent();
  passes_.Reset();
  if (!only_commits) passes_.StepSent();
  gradients_.BeginStep(part);
  StepLedger& ledger = attachment_.ledger();
  attachment_.Retire();
  if (part) {  // of no version
    last_step_ = ledger.committed_step();
    ++parts_;
    return span.Of(absl::OkStatus());
  }
  parts_ = parts_made_ = 0;
  last_step_ = ledger.StepSent(std::string(state));
  last_version_ = ledger.expected_version();
  return span.Of(absl::OkStatus());
}

absl::Status Steps::CheckSent(const char* call) const {
  return last_step_ >= 0 ? absl::OkStatus()
                         : absl::FailedPreconditionError(
                               absl::StrCat(call, " job \"", attachment_.plan().job(),
                                            "\": no step was sent in this session (rank=", attachment_.rank(), ")"));
}

absl::StatusOr<StepResult> Steps::Wait() {
  CallSpan span(attachment_, v1::TRACE_CALL_WAIT_STEP, /*group=*/-1, /*steps_ago=*/1);
  const bool told = attachment_.told();
  absl::Status came = attachment_.Live();
  if (last_step_ < 0) {
    SHARDD_RETURN_IF_ERROR(came);
    return CheckSent("wait_step");
  }
  if (came.ok() && parts_ == 0) {
    came = attachment_.Wait(attachment_.page().version, last_version_,
                            {"wait_step", nullptr, "the commit", kCommitIsLate});
  }
  // The epoch may have ended behind the commit, before this rank has looked.
  if (!came.ok() && parts_ > 0) {
    return came;
  }
  if (!came.ok() && !(absl::IsAborted(came) && attachment_.ledger().committed_step() >= last_step_)) {
    return came;
  }
  if (came.ok() && parts_ == 0) {
    SHARDD_RETURN_IF_ERROR(passes_.StepEnded());
    attachment_.Retire();
  }
  // The version is there; the event with the norm follows on the stream.
  SHARDD_ASSIGN_OR_RETURN(const absl::optional<v1::SessionEvent::Committed> committed,
                          attachment_.session().life().stream().WaitCommitted(
                              last_step_, parts_, Deadline::In(attachment_.timeout()), attachment_.interrupt()));
  if (!committed.has_value()) {
    SHARDD_RETURN_IF_ERROR(came);
    SHARDD_RETURN_IF_ERROR(attachment_.Live());
    return absl::DeadlineExceededError(
        absl::StrCat("wait_step job \"", attachment_.plan().job(), "\": ",
                     parts_ > 0 ? absl::StrCat("part ", parts_, " of step ", last_step_ + 1,
                                               " is not made: not all ranks have sent theirs, or the daemon is slow")
                                : absl::StrCat("step ", last_step_, " is committed but its result did not come"),
                     " within ", absl::FormatDuration(attachment_.timeout()), " (rank=", attachment_.rank(), ")",
                     parts_ > 0 ? kCommitIsLate : ""));
  }
  if (parts_ > 0) {
    parts_made_ = parts_;
    SHARDD_RETURN_IF_ERROR(passes_.StepEnded());
  }
  StepResult result;
  result.committed_step = committed->step();
  result.grad_norm = committed->grad_norm();
  result.clip_factor = committed->clip_factor();
  result.skipped = committed->skipped();
  attachment_.SetTold(told);
  return span.Of(absl::StatusOr<StepResult>(result));
}

absl::Status Steps::Await() {
  CallSpan span(attachment_, v1::TRACE_CALL_WAIT_STEP, /*group=*/-1, /*steps_ago=*/1);
  SHARDD_RETURN_IF_ERROR(attachment_.Live());
  SHARDD_RETURN_IF_ERROR(CheckSent("await_step"));
  if (parts_ > 0) {
    return Wait().status();
  }
  const WaitFor reason{"await_step", nullptr, "the commit of the last step"};
  // A stream goes on where the daemon dies, and what the program stores behind this would be in the shards when the
  // next daemon completes the step.
  if (attachment_.plan().pass_copies() && attachment_.outlives_daemon()) {
    SHARDD_RETURN_IF_ERROR(attachment_.Wait(attachment_.page().version, last_version_, reason));
  }
  // All that this rank gave for the step is signalled before its record was sent, so its stream may wait.
  SHARDD_RETURN_IF_ERROR(attachment_.WaitInStream(attachment_.page().version, last_version_, reason));
  attachment_.ledger().StreamAwaits(last_version_);
  return span.Of(absl::OkStatus());
}

}  // namespace shardd
