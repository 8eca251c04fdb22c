// The C ABI over ClientJob: checks what a C caller can get wrong (NULL, indices, struct sizes, fork) and converts. No
// decision is made here.

#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/c/client_job.h"
#include "client/c/process.h"
#include "client/c/shardd.h"
#include "client/c/spec_json.h"
#include "common/status/status_macros.h"
#include "common/version.h"

struct shardd_status {
  int code;
  std::string message;
};

struct shardd_job {
  std::unique_ptr<shardd::ClientJob> impl;
  std::vector<std::vector<const char*>> aliases;  // by parameter
};

namespace shardd {
namespace {

constexpr int64_t kDefaultTimeoutMs = 300000;

static_assert(std::is_same_v<int, int32_t>, "plan indices are handed out as int32_t");
static_assert(static_cast<int>(SHARDD_BOOL) == static_cast<int>(v1::DTYPE_BOOL));
static_assert(static_cast<int>(SHARDD_FLOAT32) == static_cast<int>(v1::DTYPE_FLOAT32));
static_assert(static_cast<int>(SHARDD_FORWARD) == static_cast<int>(v1::PHASE_FORWARD));
static_assert(static_cast<int>(SHARDD_BACKWARD) == static_cast<int>(v1::PHASE_BACKWARD));

shardd_status* ToC(const absl::Status& status) {
  if (status.ok()) {
    return nullptr;
  }
  return new shardd_status{static_cast<int>(status.raw_code()), std::string(status.message())};
}

absl::Status CheckNotNull(const char* call, const char* name, const void* pointer) {
  return pointer != nullptr ? absl::OkStatus()
                            : absl::InvalidArgumentError(absl::StrCat(call, ": `", name, "` is NULL"));
}

absl::Status CheckJob(const char* call, const shardd_job* job) {
  SHARDD_RETURN_IF_ERROR(CheckNotNull(call, "job", job));
  return CheckNotForked(call);
}

absl::Status CheckIndex(const char* call, const char* what, int32_t index, size_t count) {
  if (index >= 0 && static_cast<size_t>(index) < count) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(call, ": ", what, " index is out of range (got ", index, ", want 0 to ", count - 1, ")"));
}

absl::Status CheckGroup(const char* call, const shardd_job* job, int32_t group) {
  SHARDD_RETURN_IF_ERROR(CheckJob(call, job));
  return CheckIndex(call, "group", group, job->impl->plan().groups.size());
}

absl::Status CheckParam(const char* call, const shardd_job* job, int32_t param) {
  SHARDD_RETURN_IF_ERROR(CheckJob(call, job));
  return CheckIndex(call, "parameter", param, job->impl->plan().params.size());
}

// Structs begin with their size, so that later versions can append fields. `first_bytes`: what the first version had.
template <typename Struct>
absl::Status CheckStruct(const char* call, const Struct* given) {
  SHARDD_RETURN_IF_ERROR(CheckNotNull(call, "struct", given));
  if (given->struct_size < sizeof(Struct)) {
    return absl::InvalidArgumentError(absl::StrCat(call, ": struct_size is too small (got ", given->struct_size,
                                                   ", want ", sizeof(Struct), "); set it to sizeof the struct"));
  }
  return absl::OkStatus();
}

// Fills what this version knows and zeroes what a newer caller has beyond it.
template <typename Struct>
void Fill(Struct* target, Struct value) {
  const size_t size = target->struct_size;
  value.struct_size = size;
  memcpy(target, &value, sizeof(Struct));
  if (size > sizeof(Struct)) {
    memset(reinterpret_cast<char*>(target) + sizeof(Struct), 0, size - sizeof(Struct));
  }
}

absl::StatusOr<AttachOptions> ReadOptions(const shardd_attach_options* options) {
  SHARDD_RETURN_IF_ERROR(CheckStruct("attach", options));
  const char* end = reinterpret_cast<const char*>(options) + options->struct_size;
  if (std::any_of(reinterpret_cast<const char*>(options + 1), end, [](char c) { return c != 0; })) {
    return absl::UnimplementedError(
        absl::StrCat("attach: options of a newer version are set (this library is ", kVersion, ")"));
  }
  SHARDD_ASSIGN_OR_RETURN(const LaunchEnvironment environment, ReadLaunchEnvironment());
  AttachOptions result;
  SHARDD_ASSIGN_OR_RETURN(result.spec, ParseSpecJson(options->spec_json, environment));
  if (options->rank < -1) {
    return absl::InvalidArgumentError(
        absl::StrCat("attach: rank is out of range (got ", options->rank, ", want -1 or more)"));
  }
  result.rank = options->rank >= 0 ? options->rank : environment.rank;
  if (result.rank < 0) {
    return absl::InvalidArgumentError(
        "attach: this process does not know its rank (got rank -1 and no RANK); give one of them");
  }
  result.local_world = environment.local_world_size > 0 ? environment.local_world_size : result.spec.world_size();
  result.address = options->address == nullptr ? "" : options->address;
  result.replace = options->replace != 0;
  if (options->timeout_ms < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("attach: timeout_ms is out of range (got ", options->timeout_ms, ", want 0 or more)"));
  }
  result.timeout = absl::Milliseconds(options->timeout_ms == 0 ? kDefaultTimeoutMs : options->timeout_ms);
  return result;
}

absl::Status Attach(const shardd_attach_options* options, shardd_job** job) {
  SHARDD_RETURN_IF_ERROR(CheckNotNull("attach", "job", job));
  *job = nullptr;
  SHARDD_RETURN_IF_ERROR(CheckNotForked("attach"));
  InitProcess();
  SHARDD_ASSIGN_OR_RETURN(AttachOptions parsed, ReadOptions(options));
  auto result = std::make_unique<shardd_job>();
  SHARDD_ASSIGN_OR_RETURN(result->impl, ClientJob::Attach(std::move(parsed)));
  for (const ParamPlan& param : result->impl->plan().params) {
    std::vector<const char*>& names = result->aliases.emplace_back();
    for (const std::string& alias : param.aliases) {
      names.push_back(alias.c_str());
    }
  }
  *job = result.release();
  return absl::OkStatus();
}

absl::Status JobInfo(const shardd_job* job, shardd_job_info* info) {
  SHARDD_RETURN_IF_ERROR(CheckJob("get_job_info", job));
  SHARDD_RETURN_IF_ERROR(CheckStruct("get_job_info", info));
  ClientJob& impl = *job->impl;
  shardd_job_info value = {};
  value.rank = impl.rank();
  value.world_size = impl.plan().world_size;
  value.group_count = static_cast<int32_t>(impl.plan().groups.size());
  value.param_count = static_cast<int32_t>(impl.plan().params.size());
  value.epoch = impl.epoch();
  value.committed_step = impl.committed_step();
  value.version = impl.expected_version();
  value.created = impl.created() ? 1 : 0;
  value.device = impl.device().c_str();
  value.address = impl.address().c_str();
  Fill(info, value);
  return absl::OkStatus();
}

absl::Status GroupInfo(const shardd_job* job, int32_t index, shardd_group_info* info) {
  SHARDD_RETURN_IF_ERROR(CheckGroup("get_group_info", job, index));
  SHARDD_RETURN_IF_ERROR(CheckStruct("get_group_info", info));
  const GroupPlan& group = job->impl->plan().groups[static_cast<size_t>(index)];
  shardd_group_info value = {};
  value.name = group.name.c_str();
  value.param_count = static_cast<int32_t>(group.params.size());
  value.params = group.params.data();
  value.reshard_after_forward = group.reshard_after_forward ? 1 : 0;
  value.trainable = group.gradient_slot >= 0 ? 1 : 0;
  value.depth = group.depth;
  value.numel = group.numel;
  value.also_unshard_count = static_cast<int32_t>(group.also_unshards.size());
  value.also_unshards = group.also_unshards.data();
  Fill(info, value);
  return absl::OkStatus();
}

absl::Status ParamInfo(const shardd_job* job, int32_t index, shardd_param_info* info) {
  SHARDD_RETURN_IF_ERROR(CheckParam("get_param_info", job, index));
  SHARDD_RETURN_IF_ERROR(CheckStruct("get_param_info", info));
  const ShardPlan& plan = job->impl->plan();
  const ParamPlan& param = plan.params[static_cast<size_t>(index)];
  const std::vector<const char*>& aliases = job->aliases[static_cast<size_t>(index)];
  shardd_param_info value = {};
  value.fqn = param.fqn.c_str();
  value.alias_count = static_cast<int32_t>(aliases.size());
  value.aliases = aliases.data();
  value.ndim = static_cast<int32_t>(param.shape.size());
  value.shape = param.shape.data();
  value.numel = param.numel;
  value.dtype = static_cast<int32_t>(param.dtype);
  value.unsharded_dtype = static_cast<int32_t>(plan.flat_params[static_cast<size_t>(param.flat_param)].unsharded_dtype);
  value.requires_grad = param.requires_grad ? 1 : 0;
  value.group = param.group;
  value.index_in_group = param.index_in_group;
  value.flat_param = param.flat_param;
  value.offset_numel = param.offset;
  value.optimizer_group = param.optimizer_group;
  Fill(info, value);
  return absl::OkStatus();
}

absl::Status Step(shardd_job* job, const shardd_hyperparameters* groups, int32_t group_count, double max_grad_norm,
                  double loss_scale, const void* state, size_t state_bytes) {
  SHARDD_RETURN_IF_ERROR(CheckJob("step", job));
  if (group_count < 0 || (group_count > 0 && groups == nullptr)) {
    return absl::InvalidArgumentError(absl::StrCat("step: groups do not fit their number (got ", group_count, " of ",
                                                   groups == nullptr ? "NULL" : "them", ")"));
  }
  if (state_bytes > 0 && state == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("step: state is NULL (got ", state_bytes, " bytes)"));
  }
  v1::Step step;
  for (int32_t i = 0; i < group_count; ++i) {
    v1::HyperParameters* out = step.add_groups();
    out->set_lr(groups[i].lr);
    out->set_weight_decay(groups[i].weight_decay);
    out->set_beta1(groups[i].beta1);
    out->set_beta2(groups[i].beta2);
    out->set_eps(groups[i].eps);
    out->set_momentum(groups[i].momentum);
    out->set_dampening(groups[i].dampening);
    out->set_nesterov(groups[i].nesterov != 0);
  }
  step.set_max_grad_norm(max_grad_norm);
  step.set_loss_scale(loss_scale);
  return job->impl->Step(std::move(step), absl::string_view(static_cast<const char*>(state), state_bytes));
}

absl::Status WaitStep(shardd_job* job, shardd_step_result* result) {
  SHARDD_RETURN_IF_ERROR(CheckJob("wait_step", job));
  if (result != nullptr) {
    SHARDD_RETURN_IF_ERROR(CheckStruct("wait_step", result));
  }
  SHARDD_ASSIGN_OR_RETURN(const StepResult got, job->impl->WaitStep());
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

absl::Status PlanJson(const char* spec_json, char** json) {
  SHARDD_RETURN_IF_ERROR(CheckNotNull("plan_json", "json", json));
  *json = nullptr;
  SHARDD_RETURN_IF_ERROR(CheckNotForked("plan_json"));
  SHARDD_ASSIGN_OR_RETURN(const LaunchEnvironment environment, ReadLaunchEnvironment());
  SHARDD_ASSIGN_OR_RETURN(const v1::JobSpec spec, ParseSpecJson(spec_json, environment));
  SHARDD_ASSIGN_OR_RETURN(const ShardPlan plan, PlanShards(spec));
  const std::string text = PlanToJson(spec, plan);
  *json = strdup(text.c_str());
  return *json != nullptr ? absl::OkStatus() : absl::ResourceExhaustedError("plan_json: out of memory");
}

absl::Status DescribeJob(shardd_job* job, char** json) {
  SHARDD_RETURN_IF_ERROR(CheckNotNull("describe_job", "json", json));
  *json = nullptr;
  SHARDD_RETURN_IF_ERROR(CheckJob("describe_job", job));
  SHARDD_ASSIGN_OR_RETURN(const std::string text, job->impl->DescribeJson());
  *json = strdup(text.c_str());
  return *json != nullptr ? absl::OkStatus() : absl::ResourceExhaustedError("describe_job: out of memory");
}

absl::Status GetCounters(const shardd_job* job, shardd_counters* counters) {
  SHARDD_RETURN_IF_ERROR(CheckJob("get_counters", job));
  SHARDD_RETURN_IF_ERROR(CheckStruct("get_counters", counters));
  const SessionCounters session = job->impl->counters();
  shardd_counters value = {};
  value.commands = job->impl->commands();
  value.doorbells = session.doorbells;
  value.waits = session.waits;
  value.wait_ns = session.wait_ns;
  Fill(counters, value);
  return absl::OkStatus();
}

// For calls that answer without a status.
bool IsUsable(const shardd_job* job) { return job != nullptr && !IsForkedChild(); }
bool ParamIsUsable(const shardd_job* job, int32_t param) {
  return IsUsable(job) && param >= 0 && static_cast<size_t>(param) < job->impl->plan().params.size();
}

}  // namespace
}  // namespace shardd

using shardd::ToC;

// Runs `expression`, a Status, if `check` passes.
#define SHARDD_CHECKED(check, expression)                \
  do {                                                   \
    if (absl::Status checked = (check); !checked.ok()) { \
      return ToC(checked);                               \
    }                                                    \
    return ToC(expression);                              \
  } while (false)

extern "C" {

int shardd_status_code(const shardd_status* status) { return status == nullptr ? 0 : status->code; }
const char* shardd_status_message(const shardd_status* status) {
  return status == nullptr ? "" : status->message.c_str();
}
void shardd_status_free(shardd_status* status) { delete status; }
const char* shardd_version(void) { return shardd::kVersion; }

shardd_status* shardd_attach(const shardd_attach_options* options, shardd_job** job) {
  return ToC(shardd::Attach(options, job));
}
shardd_status* shardd_reattach(shardd_job* job) {
  SHARDD_CHECKED(shardd::CheckJob("reattach", job), job->impl->Reattach());
}
shardd_status* shardd_detach(shardd_job* job, int finished) {
  if (job == nullptr) {
    return nullptr;
  }
  // A child must not touch the threads and locks that it has only a picture of; the parent still owns the job.
  if (absl::Status status = shardd::CheckNotForked("detach"); !status.ok()) {
    return ToC(status);
  }
  const absl::Status status = job->impl->Detach(finished != 0);
  delete job;
  return ToC(status);
}

shardd_status* shardd_get_job_info(const shardd_job* job, shardd_job_info* info) {
  return ToC(shardd::JobInfo(job, info));
}
const void* shardd_trainer_state(const shardd_job* job, size_t* size_bytes) {
  if (size_bytes != nullptr) {
    *size_bytes = 0;
  }
  if (size_bytes == nullptr || !shardd::IsUsable(job)) {
    return nullptr;
  }
  const std::string& state = job->impl->trainer_state();
  *size_bytes = state.size();
  return state.data();
}
shardd_status* shardd_get_group_info(const shardd_job* job, int32_t group, shardd_group_info* info) {
  return ToC(shardd::GroupInfo(job, group, info));
}
shardd_status* shardd_get_param_info(const shardd_job* job, int32_t param, shardd_param_info* info) {
  return ToC(shardd::ParamInfo(job, param, info));
}
int32_t shardd_find_param(const shardd_job* job, const char* fqn) {
  return fqn == nullptr || !shardd::IsUsable(job) ? -1 : job->impl->plan().FindParam(fqn);
}
int32_t shardd_find_group(const shardd_job* job, const char* name) {
  return name == nullptr || !shardd::IsUsable(job) ? -1 : job->impl->plan().FindGroup(name);
}

shardd_status* shardd_write_parameter(shardd_job* job, int32_t param, const void* data, int64_t first, int64_t numel) {
  SHARDD_CHECKED(shardd::CheckParam("write_parameter", job, param),
                 job->impl->WriteParameter(param, data, first, numel));
}
shardd_status* shardd_commit_parameters(shardd_job* job) {
  SHARDD_CHECKED(shardd::CheckJob("commit_parameters", job), job->impl->CommitParameters());
}

shardd_status* shardd_unshard(shardd_job* job, int32_t group, shardd_phase phase) {
  if (phase != SHARDD_FORWARD && phase != SHARDD_BACKWARD) {
    return ToC(absl::InvalidArgumentError(
        absl::StrCat("unshard: phase is out of range (got ", static_cast<int>(phase), ", want 1 or 2)")));
  }
  SHARDD_CHECKED(shardd::CheckGroup("unshard", job, group),
                 job->impl->Unshard(group, phase == SHARDD_FORWARD ? shardd::HandleEvent::kUnshardForward
                                                                   : shardd::HandleEvent::kUnshardBackward));
}
shardd_status* shardd_wait_unshard(shardd_job* job, int32_t group) {
  SHARDD_CHECKED(shardd::CheckGroup("wait_unshard", job, group), job->impl->WaitUnshard(group));
}
const void* shardd_parameter_data(const shardd_job* job, int32_t param) {
  return shardd::ParamIsUsable(job, param) ? job->impl->ParameterData(param) : nullptr;
}
shardd_status* shardd_reshard(shardd_job* job, int32_t group) {
  SHARDD_CHECKED(shardd::CheckGroup("reshard", job, group), job->impl->Reshard(group));
}

shardd_status* shardd_wait_gradient_slot(shardd_job* job, int32_t group) {
  SHARDD_CHECKED(shardd::CheckGroup("wait_gradient_slot", job, group), job->impl->WaitGradientSlot(group));
}
void* shardd_gradient_data(const shardd_job* job, int32_t param) {
  return shardd::ParamIsUsable(job, param) ? job->impl->GradientData(param) : nullptr;
}
shardd_status* shardd_submit_gradients(shardd_job* job, int32_t group, const uint8_t* present, const uint8_t* fresh) {
  SHARDD_CHECKED(shardd::CheckGroup("submit_gradients", job, group), job->impl->SubmitGradients(group, present, fresh));
}
shardd_status* shardd_backward_done(shardd_job* job, int last) {
  SHARDD_CHECKED(shardd::CheckJob("backward_done", job), job->impl->BackwardDone(last != 0));
}

const void* shardd_stored_parameter_data(const shardd_job* job, int32_t param) {
  return shardd::ParamIsUsable(job, param) ? job->impl->StoredParameterData(param) : nullptr;
}
void* shardd_gradient_shard_data(const shardd_job* job, int32_t param) {
  return shardd::ParamIsUsable(job, param) ? job->impl->GradientShardData(param) : nullptr;
}
shardd_status* shardd_wait_gradients(shardd_job* job) {
  SHARDD_CHECKED(shardd::CheckJob("wait_gradients", job), job->impl->WaitGradients());
}
shardd_status* shardd_enter_pass(shardd_job* job, int stepped, const void* state, size_t state_bytes) {
  SHARDD_CHECKED(shardd::CheckJob("enter_pass", job),
                 state == nullptr && state_bytes > 0
                     ? absl::InvalidArgumentError("enter_pass: state is NULL with state_bytes above 0")
                     : job->impl->EnterPass(stepped != 0, {static_cast<const char*>(state), state_bytes}));
}
shardd_status* shardd_leave_pass(shardd_job* job) {
  SHARDD_CHECKED(shardd::CheckJob("leave_pass", job), job->impl->LeavePass());
}
shardd_status* shardd_open_window(shardd_job* job) {
  SHARDD_CHECKED(shardd::CheckJob("open_window", job), job->impl->OpenWindow());
}
shardd_status* shardd_watch_writes(shardd_job* job, int on) {
  SHARDD_CHECKED(shardd::CheckJob("watch_writes", job), job->impl->WatchWrites(on != 0));
}
void* shardd_optimizer_state_data(const shardd_job* job, int32_t param, int32_t state) {
  return shardd::ParamIsUsable(job, param) ? job->impl->OptimizerStateData(param, state) : nullptr;
}
shardd_status* shardd_set_interrupt(shardd_job* job, int (*interrupted)(void* context), void* context) {
  if (absl::Status status = shardd::CheckNotForked("set_interrupt"); !status.ok()) {
    return ToC(status);
  }
  shardd::Interrupt::Question question;
  if (interrupted != nullptr) {
    question = [=] { return interrupted(context) != 0; };
  }
  if (job == nullptr) {
    shardd::Interrupt::SetForProcess(std::move(question));
  } else {
    job->impl->SetInterrupt(std::move(question));
  }
  return nullptr;
}

shardd_status* shardd_step(shardd_job* job, const shardd_hyperparameters* groups, int32_t group_count,
                           double max_grad_norm, const void* state, size_t state_bytes) {
  return ToC(shardd::Step(job, groups, group_count, max_grad_norm, 0, state, state_bytes));
}
shardd_status* shardd_step_with(shardd_job* job, const shardd_step_options* options) {
  if (absl::Status status = shardd::CheckStruct("step_with", options); !status.ok()) {
    return ToC(status);
  }
  return ToC(shardd::Step(job, options->groups, options->group_count, options->max_grad_norm, options->loss_scale,
                          options->state, options->state_bytes));
}
shardd_status* shardd_wait_step(shardd_job* job, shardd_step_result* result) {
  return ToC(shardd::WaitStep(job, result));
}

shardd_status* shardd_enter_full_params(shardd_job* job, int writeback) {
  SHARDD_CHECKED(shardd::CheckJob("enter_full_params", job), job->impl->EnterFullParams(writeback != 0));
}
const void* shardd_full_parameter_data(const shardd_job* job, int32_t param) {
  return shardd::ParamIsUsable(job, param) ? job->impl->FullParameterData(param) : nullptr;
}
shardd_status* shardd_leave_full_params(shardd_job* job) {
  SHARDD_CHECKED(shardd::CheckJob("leave_full_params", job), job->impl->LeaveFullParams());
}

shardd_status* shardd_plan_json(const char* spec_json, char** json) { return ToC(shardd::PlanJson(spec_json, json)); }
void shardd_string_free(char* text) { free(text); }
shardd_status* shardd_describe_job(shardd_job* job, char** json) { return ToC(shardd::DescribeJob(job, json)); }
shardd_status* shardd_get_counters(const shardd_job* job, shardd_counters* counters) {
  return ToC(shardd::GetCounters(job, counters));
}

}  // extern "C"
