#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/c/call_span.h"
#include "client/c/client_job.h"
#include "common/status/status_macros.h"
#include "common/tensor/norm.h"

namespace shardd {
namespace {

// The daemon checks the same and more (all ranks equal); there a mistake costs every rank the step, here only this
// call.
absl::Status CheckHyperParameters(int index, const v1::HyperParameters& group, v1::OptimizerKind kind,
                                  bool has_momentum) {
  const auto refuse = [index](const char* field, double got, const char* want) {
    return absl::InvalidArgumentError(
        absl::StrCat("optimizer group ", index, ": ", field, " is out of range (got ", got, ", want ", want, ")"));
  };
  const bool is_adam = kind == v1::OPTIMIZER_KIND_ADAMW || kind == v1::OPTIMIZER_KIND_ADAM;
  const struct {
    const char* field;
    double value;
    bool bounded;  // below 1
    bool used;
  } fields[] = {
      {"lr", group.lr(), false, true},         {"weight_decay", group.weight_decay(), false, true},
      {"beta1", group.beta1(), true, is_adam}, {"beta2", group.beta2(), true, is_adam},
      {"eps", group.eps(), false, is_adam},    {"momentum", group.momentum(), false, kind == v1::OPTIMIZER_KIND_SGD}};
  for (const auto& field : fields) {
    const double high = field.bounded ? 1 : std::numeric_limits<double>::infinity();
    if (field.used && !(field.value >= 0 && field.value < high)) {
      return refuse(field.field, field.value, field.bounded ? "[0, 1)" : "finite, >= 0");
    }
  }
  if (kind != v1::OPTIMIZER_KIND_SGD) {
    return absl::OkStatus();
  }
  if (!std::isfinite(group.dampening())) {
    return refuse("dampening", group.dampening(), "finite");
  }
  if (group.momentum() > 0 && !has_momentum) {
    return refuse("momentum", group.momentum(), "0, or OptimizerConfig.momentum set");
  }
  if (group.nesterov() && (group.momentum() == 0 || group.dampening() != 0)) {
    return refuse("momentum", group.momentum(), "above 0 and dampening 0, because nesterov is set");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ClientJob::CheckStep(const v1::Step& step, absl::string_view state) const {
  const std::string object = absl::StrCat("step job \"", spec().name(), "\": ");
  const v1::OptimizerKind kind = plan_.config.optimizer().kind();
  const bool updates =
      kind == v1::OPTIMIZER_KIND_ADAMW || kind == v1::OPTIMIZER_KIND_ADAM || kind == v1::OPTIMIZER_KIND_SGD;
  const int want_groups = updates ? plan_.config.optimizer().groups_size() + 1 : 0;
  if (step.groups_size() != want_groups) {
    return absl::InvalidArgumentError(absl::StrCat(object, "wrong number of optimizer groups (got ", step.groups_size(),
                                                   ", want ", want_groups, "; rank=", rank(), ")"));
  }
  for (int i = 0; i < want_groups; ++i) {
    if (absl::Status status = CheckHyperParameters(i, step.groups(i), kind, plan_.optimizer_states > 0); !status.ok()) {
      return absl::Status(status.code(), absl::StrCat(object, status.message()));
    }
  }
  if (static_cast<int64_t>(state.size()) > kMaxTrainerStateBytes) {
    return absl::InvalidArgumentError(absl::StrCat(object, "trainer state is too large (got ", state.size(),
                                                   " bytes, want at most ", kMaxTrainerStateBytes, "; rank=", rank(),
                                                   ")"));
  }
  if (!(step.max_grad_norm() >= 0)) {
    return absl::InvalidArgumentError(absl::StrCat(object, "max_grad_norm is out of range (got ", step.max_grad_norm(),
                                                   ", want 0 or more; rank=", rank(), ")"));
  }
  if (step.norm_type() != 0 && !Norm::IsOrder(step.norm_type())) {
    return absl::InvalidArgumentError(absl::StrCat(object, "norm_type is out of range (got ", step.norm_type(),
                                                   ", want above 0, infinity included, or 0 for 2; rank=", rank(),
                                                   ")"));
  }
  if (!(step.loss_scale() >= 0) || std::isinf(step.loss_scale())) {
    return absl::InvalidArgumentError(absl::StrCat(object, "loss_scale is out of range (got ", step.loss_scale(),
                                                   ", want finite, 0 or more; rank=", rank(), ")"));
  }
  if (expected_version_ == 0) {
    return absl::FailedPreconditionError(absl::StrCat(object, "the parameters have no values yet (version 0; rank=",
                                                      rank(), "); call shardd_commit_parameters first"));
  }
  if (progress_.backward_open) {
    return absl::FailedPreconditionError(
        absl::StrCat(object, "gradients were submitted in a backward that is not closed (", progress_.backwards,
                     " backwards closed; rank=", rank(), "); call shardd_backward_done first"));
  }
  return absl::OkStatus();
}

absl::Status ClientJob::Step(v1::Step step, absl::string_view state) {
  CallSpan span(this, session_.get(), v1::TRACE_CALL_STEP);
  SHARDD_RETURN_IF_ERROR(Live());
  SHARDD_RETURN_IF_ERROR(CheckStep(step, state));
  if (plan_.config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER) {
    return absl::FailedPreconditionError(absl::StrCat("step job \"", spec().name(),
                                                      "\": its optimizer runs in the trainers (rank=", rank(),
                                                      "); write in a window, shardd_enter_pass commits it"));
  }
  if (!progress_.state_written.empty()) {
    return absl::FailedPreconditionError(absl::StrCat("step job \"", spec().name(), "\": ", progress_.state_written,
                                                      " was written in place, and it is the daemon's (rank=", rank(),
                                                      "); load it into the optimizer first"));
  }
  step.set_trainer_state(state.data(), state.size());
  const std::string payload = step.SerializeAsString();
  if (static_cast<int64_t>(payload.size()) > kStepPayloadBytes) {
    return absl::InvalidArgumentError(absl::StrCat("step job \"", spec().name(), "\": message is too large (got ",
                                                   payload.size(), " bytes, want at most ", kStepPayloadBytes,
                                                   "; rank=", rank(), "); use fewer optimizer groups"));
  }
  SHARDD_RETURN_IF_ERROR(WaitCommitted("step", nullptr));
  const WaitFor reason{"step", nullptr, "the daemon's copy of what was sent before"};
  SHARDD_RETURN_IF_ERROR(Note(session_->WaitConsumed(progress_.payload_record, reason)));
  SHARDD_RETURN_IF_ERROR(Note(session_->WaitSpace(1, reason)));
  SHARDD_ASSIGN_OR_RETURN(const uint64_t done, GiveBack(reason));
  SHARDD_RETURN_IF_ERROR(ApplyToAll(HandleEvent::kStep));
  payload.copy(session_->memory().At<char>(layout_.payload_offset_bytes), payload.size());
  CommandRecord record = {};
  record.opcode = Opcode::kStep;
  record.arg0 = static_cast<int64_t>(payload.size());
  record.done = done;
  if (std::exchange(progress_.window, false)) {
    (void)session_->SetShardsWritable(false);  // before the daemon may update
  }
  SHARDD_RETURN_IF_ERROR(Note(session_->Send(record, /*act=*/true, reason)));
  session_->NeedSums(progress_.backwards_closed);
  progress_.inside_pass = progress_.paused = false;
  progress_.written.clear();
  progress_.payload_record = session_->submitted();
  progress_.half_record[0] = progress_.half_record[1] = session_->submitted();
  progress_.half_used_bytes = 0;
  progress_.backwards = 0;
  progress_.last_closed = progress_.has_gradients = false;
  RetireSteps();
  const int64_t number = (progress_.pending_steps.empty() ? committed_step_ : progress_.pending_steps.back().step) + 1;
  ++expected_version_;
  progress_.last_step = number;
  progress_.last_step_version = expected_version_;
  progress_.pending_steps.push_back({number, expected_version_, std::string(state)});
  return span.Of(absl::OkStatus());
}

absl::StatusOr<StepResult> ClientJob::WaitStep() {
  CallSpan span(this, session_.get(), v1::TRACE_CALL_WAIT_STEP, /*group=*/-1, /*steps_ago=*/1);
  SHARDD_RETURN_IF_ERROR(Live());
  if (progress_.last_step < 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("wait_step job \"", spec().name(), "\": no step was sent in this session (rank=", rank(), ")"));
  }
  const WaitFor reason{"wait_step", nullptr, "the commit"};
  SHARDD_RETURN_IF_ERROR(
      Note(session_->Wait(session_->daemon_page().page().version, progress_.last_step_version, reason)));
  RetireSteps();
  // The version is there; the event with the norm follows on the stream.
  SHARDD_ASSIGN_OR_RETURN(
      const absl::optional<v1::SessionEvent::Committed> committed,
      session_->stream().WaitCommitted(progress_.last_step, absl::Now() + options_.timeout, interrupt_));
  if (!committed.has_value()) {
    SHARDD_RETURN_IF_ERROR(Live());
    return absl::DeadlineExceededError(
        absl::StrCat("wait_step job \"", spec().name(), "\": the step is committed but its result did not come within ",
                     absl::FormatDuration(options_.timeout), " (step ", progress_.last_step, "; rank=", rank(), ")"));
  }
  StepResult result;
  result.committed_step = committed->step();
  result.grad_norm = committed->grad_norm();
  result.clip_factor = committed->clip_factor();
  result.skipped = committed->skipped();
  return span.Of(absl::StatusOr<StepResult>(result));
}

absl::Status ClientJob::AwaitStep() {
  CallSpan span(this, session_.get(), v1::TRACE_CALL_WAIT_STEP, /*group=*/-1, /*steps_ago=*/1);
  SHARDD_RETURN_IF_ERROR(Live());
  if (progress_.last_step < 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("await_step job \"", spec().name(), "\": no step was sent in this session (rank=", rank(), ")"));
  }
  // All that this rank gave for the step is signalled before its record was sent, so its stream may wait.
  SHARDD_RETURN_IF_ERROR(
      Note(session_->WaitInStream(session_->daemon_page().page().version, progress_.last_step_version,
                                  {"await_step", nullptr, "the commit of the last step"})));
  progress_.awaited_version = progress_.last_step_version;
  return span.Of(absl::OkStatus());
}

}  // namespace shardd
