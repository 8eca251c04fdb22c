// The C ABI: what changes the job.

#include <string.h>

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "client/c/api/api_internal.h"
#include "client/c/attachment/shards.h"
#include "common/plan/optimizer_kinds.h"

namespace shardd::api {
namespace {

absl::Status Step(shardd_job* job, const shardd_step_options& options) {
  SHARDD_RETURN_IF_ERROR(CheckJob("step", job));
  const shardd_hyperparameters* const groups = options.groups;
  const int32_t group_count = options.group_count;
  if (group_count < 0 || (group_count > 0 && groups == nullptr)) {
    return absl::InvalidArgumentError(absl::StrCat("step: groups do not fit their number (got ", group_count, " of ",
                                                   groups == nullptr ? "NULL" : "them", ")"));
  }
  if (options.state_bytes > 0 && options.state == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("step: state is NULL (got ", options.state_bytes, " bytes)"));
  }
  const v1::OptimizerConfig& optimizer = job->impl->attachment().plan().plan().config.optimizer();
  v1::Step step;
  for (int32_t i = 0; i < group_count; ++i) {
    const v1::OptimizerKind kind = OptimizerKindOf(optimizer, std::min(i, optimizer.groups_size()));
    v1::HyperParameters* out = step.add_groups();
    out->set_lr(groups[i].lr);
    out->set_weight_decay(groups[i].weight_decay);
    if (kind == v1::OPTIMIZER_KIND_ADAGRAD) {
      out->set_lr_decay(groups[i].lr_decay);
      out->set_initial_accumulator_value(groups[i].initial_accumulator_value);
    } else if (kind == v1::OPTIMIZER_KIND_MUON) {
      if (groups[i].adjust_lr != SHARDD_ADJUST_LR_ORIGINAL && groups[i].adjust_lr != SHARDD_ADJUST_LR_MATCH_RMS_ADAMW) {
        return absl::InvalidArgumentError(absl::StrCat("step: adjust_lr of optimizer group ", i, " is unknown (got ",
                                                       groups[i].adjust_lr, ", want 0 or 1)"));
      }
      out->set_ns_a(groups[i].ns_a);
      out->set_ns_b(groups[i].ns_b);
      out->set_ns_c(groups[i].ns_c);
      out->set_ns_steps(groups[i].ns_steps);
      out->set_adjust_lr(groups[i].adjust_lr == SHARDD_ADJUST_LR_MATCH_RMS_ADAMW ? v1::ADJUST_LR_MATCH_RMS_ADAMW
                                                                                 : v1::ADJUST_LR_ORIGINAL);
    } else if (kind == v1::OPTIMIZER_KIND_ADAFACTOR) {
      out->set_beta2_decay(groups[i].beta2_decay);
      out->set_eps2(groups[i].eps2);
      out->set_d(groups[i].d);
    } else if (kind == v1::OPTIMIZER_KIND_RMSPROP || kind == v1::OPTIMIZER_KIND_CENTERED_RMSPROP) {
      out->set_alpha(groups[i].alpha);
    } else {
      out->set_beta1(groups[i].beta1);
      out->set_beta2(groups[i].beta2);
    }
    out->set_eps(groups[i].eps);
    out->set_momentum(groups[i].momentum);
    if (kind != v1::OPTIMIZER_KIND_MUON && kind != v1::OPTIMIZER_KIND_ADAFACTOR)
      out->set_dampening(groups[i].dampening);
    out->set_nesterov(groups[i].nesterov != 0);
  }
  step.set_max_grad_norm(options.max_grad_norm);
  step.set_loss_scale(options.loss_scale);
  step.set_norm_type(options.norm_type);
  if (options.left_group_count < 0 || (options.left_group_count > 0 && options.left_groups == nullptr)) {
    return absl::InvalidArgumentError(absl::StrCat("step: left_groups do not fit their number (got ",
                                                   options.left_group_count, " of ",
                                                   options.left_groups == nullptr ? "NULL" : "them", ")"));
  }
  step.mutable_left_groups()->Add(options.left_groups, options.left_groups + options.left_group_count);
  step.set_part(options.part != 0);
  return job->impl->steps().Send(std::move(step), {static_cast<const char*>(options.state), options.state_bytes});
}

absl::Status GivenByOthers(ClientJob& job, const int32_t** params, int32_t* count) {
  if (params == nullptr || count == nullptr) {
    return absl::InvalidArgumentError("given_by_others: params or count is NULL");
  }
  SHARDD_ASSIGN_OR_RETURN(const std::vector<int32_t>* given, job.gradients().GivenByOthers());
  *params = given->data();
  *count = static_cast<int32_t>(given->size());
  return absl::OkStatus();
}

static_assert(sizeof(shardd_hyperparameters) == 64, "programs pass arrays of them");

// Of a program that was built before there were parts of steps, too.
absl::Status StepWith(shardd_job* job, const shardd_step_options* given) {
  SHARDD_RETURN_IF_ERROR(CheckNotNull("step_with", "options", given));
  constexpr size_t kBeforeParts = offsetof(shardd_step_options, left_groups);
  if (given->struct_size != kBeforeParts) {
    SHARDD_RETURN_IF_ERROR(CheckStruct("step_with", given));
  }
  shardd_step_options options = {};
  memcpy(&options, given, std::min(given->struct_size, sizeof(options)));
  return Step(job, options);
}

absl::Status EnterFullParams(shardd_job* job, const shardd_full_params_options* given) {
  SHARDD_RETURN_IF_ERROR(CheckJob("enter_full_params", job));
  SHARDD_RETURN_IF_ERROR(CheckStruct("enter_full_params", given));
  if (given->group != -1) {
    SHARDD_RETURN_IF_ERROR(CheckGroup("enter_full_params", job, given->group));
  }
  const Attachment& attachment = job->impl->attachment();
  if (given->offload_to_cpu != 0 && attachment.memory().on_device() && !IsOffloaded(attachment)) {
    return absl::UnimplementedError(absl::StrCat(
        "enter_full_params: offload_to_cpu is not served where the job lies on a GPU (device=", attachment.device(),
        "); copy from the pointers that are given"));
  }
  FullParamsOptions options;
  options.group = given->group;
  options.recurse = given->recurse != 0;
  options.writeback = given->writeback != 0;
  options.rank0_only = given->rank0_only != 0;
  options.with_grads = given->with_grads != 0;
  return job->impl->full_params().Enter(options);
}

absl::Status WaitStep(shardd_job* job, shardd_step_result* result) {
  SHARDD_RETURN_IF_ERROR(CheckJob("wait_step", job));
  if (result != nullptr) {
    SHARDD_RETURN_IF_ERROR(CheckStruct("wait_step", result));
  }
  SHARDD_ASSIGN_OR_RETURN(const StepResult got, job->impl->steps().Wait());
  if (result != nullptr) {
    shardd_step_result value = {};
    value.committed_step = got.committed_step;
    value.grad_norm = got.grad_norm;
    value.clip_factor = got.clip_factor;
    value.skipped = got.skipped ? 1 : 0;
    Fill(result, value);
  }
  return absl::OkStatus();
}

absl::Status HasEdits(ClientJob& job, int32_t* has_edits) {
  SHARDD_RETURN_IF_ERROR(CheckNotNull("has_edits", "has_edits", has_edits));
  *has_edits = 0;
  SHARDD_ASSIGN_OR_RETURN(const bool has, job.passes().HasEdits());
  *has_edits = has ? 1 : 0;
  return absl::OkStatus();
}

const void* StoredParameterData(ClientJob& job, int32_t param) {
  return StoredParameterAt(job.attachment(), param, job.rank_plan().copy_of(job.plan().shard_copies));
}

// What lies in a CUDA graph is noted instead of made, while the graph is captured.
absl::Status Unshard(ClientJob& job, int32_t group, HandleEvent event) {
  return job.graphs().noting() ? job.graphs().NoteUnshard(group, event) : job.unsharding().Unshard(group, event);
}
absl::Status WaitUnshard(ClientJob& job, int32_t group) {
  return job.graphs().noting() ? job.graphs().NoteWaitUnshard(group) : job.unsharding().Wait(group);
}
absl::Status Reshard(ClientJob& job, int32_t group) {
  return job.graphs().noting() ? job.graphs().NoteReshard(group) : job.unsharding().Reshard(group);
}
absl::Status WaitGradientSlot(ClientJob& job, int32_t group) {
  return job.graphs().noting() ? job.graphs().NoteWaitGradientSlot(group) : job.gradients().WaitSlot(group);
}
absl::Status SubmitGradients(ClientJob& job, int32_t group, const uint8_t* present, const uint8_t* fresh) {
  return job.graphs().noting() ? job.graphs().NoteSubmitGradients(group, present, fresh)
                               : job.gradients().Submit(group, present, fresh);
}
absl::Status BackwardDone(ClientJob& job, bool last) {
  return job.graphs().noting() ? job.graphs().NoteBackwardDone(last) : job.gradients().BackwardDone(last);
}

}  // namespace
}  // namespace shardd::api

namespace api = shardd::api;
using api::ToC;

extern "C" {

shardd_status* shardd_write_parameter(shardd_job* job, int32_t param, const void* data, int64_t first, int64_t numel) {
  SHARDD_CHECKED(api::CheckParam("write_parameter", job, param),
                 job->impl->values().WriteParameter(param, data, first, numel));
}
shardd_status* shardd_write_optimizer_state(shardd_job* job, int32_t param, int32_t state, const float* data,
                                            int64_t first, int64_t numel) {
  SHARDD_CHECKED(api::CheckParam("write_optimizer_state", job, param),
                 job->impl->values().WriteOptimizerState(param, state, data, first, numel));
}
shardd_status* shardd_write_update_count(shardd_job* job, int32_t param, int64_t count) {
  SHARDD_CHECKED(api::CheckParam("write_update_count", job, param), job->impl->values().WriteUpdateCount(param, count));
}
shardd_status* shardd_commit_parameters(shardd_job* job) {
  SHARDD_CHECKED(api::CheckJob("commit_parameters", job), job->impl->values().Commit());
}

shardd_status* shardd_unshard(shardd_job* job, int32_t group, shardd_phase phase) {
  if (phase != SHARDD_FORWARD && phase != SHARDD_BACKWARD) {
    return ToC(absl::InvalidArgumentError(
        absl::StrCat("unshard: phase is out of range (got ", static_cast<int>(phase), ", want 1 or 2)")));
  }
  SHARDD_CHECKED(api::CheckGroup("unshard", job, group),
                 api::Unshard(*job->impl, group,
                              phase == SHARDD_FORWARD ? shardd::HandleEvent::kUnshardForward
                                                      : shardd::HandleEvent::kUnshardBackward));
}
shardd_status* shardd_wait_unshard(shardd_job* job, int32_t group) {
  SHARDD_CHECKED(api::CheckGroup("wait_unshard", job, group), api::WaitUnshard(*job->impl, group));
}
const void* shardd_parameter_data(const shardd_job* job, int32_t param) {
  return api::ParamIsUsable(job, param) ? job->impl->unsharding().ParameterData(param) : nullptr;
}
shardd_status* shardd_reshard(shardd_job* job, int32_t group) {
  SHARDD_CHECKED(api::CheckGroup("reshard", job, group), api::Reshard(*job->impl, group));
}

shardd_status* shardd_wait_gradient_slot(shardd_job* job, int32_t group) {
  SHARDD_CHECKED(api::CheckGroup("wait_gradient_slot", job, group), api::WaitGradientSlot(*job->impl, group));
}
void* shardd_gradient_data(const shardd_job* job, int32_t param) {
  return api::ParamIsUsable(job, param) ? job->impl->gradients().SlotData(param) : nullptr;
}
shardd_status* shardd_submit_gradients(shardd_job* job, int32_t group, const uint8_t* present, const uint8_t* fresh) {
  SHARDD_CHECKED(api::CheckGroup("submit_gradients", job, group),
                 api::SubmitGradients(*job->impl, group, present, fresh));
}
shardd_status* shardd_backward_done(shardd_job* job, int last) {
  SHARDD_CHECKED(api::CheckJob("backward_done", job), api::BackwardDone(*job->impl, last != 0));
}

shardd_status* shardd_abandon_backward(shardd_job* job) {
  SHARDD_CHECKED(api::CheckJob("abandon_backward", job), job->impl->gradients().AbandonBackward());
}
shardd_status* shardd_give_back_gradient(shardd_job* job, int32_t param) {
  SHARDD_CHECKED(api::CheckParam("give_back_gradient", job, param), job->impl->gradients().GiveBack(param));
}
shardd_status* shardd_set_gradient_presence(shardd_job* job, int32_t param, int present) {
  SHARDD_CHECKED(api::CheckParam("set_gradient_presence", job, param),
                 job->impl->gradients().SetPresence(param, present != 0));
}

const void* shardd_stored_parameter_data(const shardd_job* job, int32_t param) {
  return api::ParamIsUsable(job, param) ? api::StoredParameterData(*job->impl, param) : nullptr;
}
void* shardd_gradient_shard_data(const shardd_job* job, int32_t param) {
  return api::ParamIsUsable(job, param) ? job->impl->gradients().ShardData(param) : nullptr;
}
shardd_status* shardd_wait_gradients(shardd_job* job) {
  SHARDD_CHECKED(api::CheckJob("wait_gradients", job), job->impl->gradients().WaitReduced());
}
shardd_status* shardd_given_by_others(shardd_job* job, const int32_t** params, int32_t* count) {
  if (params != nullptr) *params = nullptr;
  if (count != nullptr) *count = 0;
  SHARDD_CHECKED(api::CheckJob("given_by_others", job), api::GivenByOthers(*job->impl, params, count));
}
shardd_status* shardd_enter_pass(shardd_job* job, int stepped, const void* state, size_t state_bytes) {
  SHARDD_CHECKED(api::CheckJob("enter_pass", job),
                 state == nullptr && state_bytes > 0
                     ? absl::InvalidArgumentError("enter_pass: state is NULL with state_bytes above 0")
                     : job->impl->passes().Enter(stepped != 0, {static_cast<const char*>(state), state_bytes}));
}
shardd_status* shardd_leave_pass(shardd_job* job) {
  SHARDD_CHECKED(api::CheckJob("leave_pass", job), job->impl->passes().Leave());
}
shardd_status* shardd_stop_reading(shardd_job* job) {
  SHARDD_CHECKED(api::CheckJob("stop_reading", job), job->impl->passes().StopReading());
}
shardd_status* shardd_resume_reading(shardd_job* job) {
  SHARDD_CHECKED(api::CheckJob("resume_reading", job), job->impl->passes().ResumeReading());
}
int32_t shardd_inside_pass(const shardd_job* job) {
  return api::CheckJob("inside_pass", job).ok() && job->impl->passes().inside() ? 1 : 0;
}
shardd_status* shardd_has_edits(shardd_job* job, int32_t* has_edits) {
  SHARDD_CHECKED(api::CheckJob("has_edits", job), api::HasEdits(*job->impl, has_edits));
}
shardd_status* shardd_hand_in_edits(shardd_job* job) {
  SHARDD_CHECKED(api::CheckJob("hand_in_edits", job), job->impl->passes().HandIn());
}
shardd_status* shardd_await_store(shardd_job* job) {
  SHARDD_CHECKED(api::CheckJob("await_store", job), job->impl->passes().AwaitStore());
}
shardd_status* shardd_watch_writes(shardd_job* job, int on) {
  SHARDD_CHECKED(api::CheckJob("watch_writes", job), job->impl->read_only_memory().Set(on != 0));
}
void* shardd_optimizer_state_data(const shardd_job* job, int32_t param, int32_t state) {
  return api::ParamIsUsable(job, param) ? job->impl->optimizer_state().Data(param, state) : nullptr;
}
shardd_status* shardd_step(shardd_job* job, const shardd_hyperparameters* groups, int32_t group_count,
                           double max_grad_norm, const void* state, size_t state_bytes) {
  shardd_step_options options = {};
  options.groups = groups;
  options.group_count = group_count;
  options.max_grad_norm = max_grad_norm;
  options.state = state;
  options.state_bytes = state_bytes;
  return ToC(api::Step(job, options));
}
shardd_status* shardd_step_with(shardd_job* job, const shardd_step_options* options) {
  return ToC(api::StepWith(job, options));
}
shardd_status* shardd_wait_step(shardd_job* job, shardd_step_result* result) { return ToC(api::WaitStep(job, result)); }
shardd_status* shardd_await_step(shardd_job* job) {
  SHARDD_CHECKED(api::CheckJob("await_step", job), job->impl->steps().Await());
}

shardd_status* shardd_enter_full_params(shardd_job* job, int writeback) {
  shardd::FullParamsOptions options;
  options.writeback = writeback != 0;
  SHARDD_CHECKED(api::CheckJob("enter_full_params", job), job->impl->full_params().Enter(options));
}
shardd_status* shardd_enter_full_params_with(shardd_job* job, const shardd_full_params_options* options) {
  return ToC(api::EnterFullParams(job, options));
}
const void* shardd_full_gradient_data(const shardd_job* job, int32_t param) {
  return api::ParamIsUsable(job, param) ? job->impl->full_params().GradientData(param) : nullptr;
}
shardd_status* shardd_write_gradient(shardd_job* job, int32_t param, const void* data, int64_t first, int64_t numel) {
  SHARDD_CHECKED(api::CheckParam("write_gradient", job, param),
                 job->impl->values().WriteGradient(param, data, first, numel));
}
const void* shardd_full_parameter_data(const shardd_job* job, int32_t param) {
  return api::ParamIsUsable(job, param) ? job->impl->full_params().ParameterData(param) : nullptr;
}
shardd_status* shardd_leave_full_params(shardd_job* job) {
  SHARDD_CHECKED(api::CheckJob("leave_full_params", job), job->impl->full_params().Leave());
}

}  // extern "C"
