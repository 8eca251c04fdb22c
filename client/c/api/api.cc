// The C ABI over ClientJob and its parts, which decide everything; here calls are checked and converted. This part:
// status, the life of an attachment.

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/c/api/api_internal.h"
#include "client/c/api/spec_json.h"
#include "client/c/host/interrupt.h"
#include "client/c/host/launcher.h"
#include "client/c/job/program_stream.h"
#include "common/secret/job_secret.h"
#include "common/version.h"

namespace shardd::api {
namespace {

absl::StatusOr<int> ReadNode(const shardd_attach_options& options, const v1::JobSpec& spec,
                             const LaunchEnvironment& environment) {
  const int nodes = spec.config().nodes().addresses_size();
  if (nodes == 0 && options.node == -1) {
    return 0;
  }
  const int node = options.node == -1 ? environment.node : options.node;
  if (options.node == -1 && node < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("attach job \"", spec.name(),
                     "\": this process does not know its node (got node -1 and neither SHARDD_NODE nor "
                     "GROUP_RANK, nor a launcher's number of it); give one of them"));
  }
  if (node < 0 || node >= std::max(nodes, 1)) {
    return absl::InvalidArgumentError(absl::StrCat("attach job \"", spec.name(), "\": node is out of range (got ", node,
                                                   ", want 0 to ", std::max(nodes, 1) - 1, ", of ", nodes,
                                                   " in config.nodes)"));
  }
  return node;
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
  const bool several = result.spec.config().has_nodes();
  result.rank = options->rank >= 0 ? options->rank : several ? environment.local_rank : environment.rank;
  if (result.rank < 0) {
    return absl::InvalidArgumentError(absl::StrCat("attach: this process does not know its rank (got rank -1 and no ",
                                                   several ? "LOCAL_RANK" : "RANK", "); give one of them"));
  }
  SHARDD_ASSIGN_OR_RETURN(result.node, ReadNode(*options, result.spec, environment));
  result.local_world = environment.local_world_size > 0 ? environment.local_world_size : result.spec.world_size();
  result.address = options->address == nullptr ? "" : options->address;
  result.replace = options->replace != 0;
  result.adopt = options->adopt != 0;
  result.device_memory = options->device_memory != 0;
  result.control = environment.control;
  if (options->job_secret != nullptr) {
    result.job_secret = options->job_secret;
    SHARDD_RETURN_IF_ERROR(CheckJobSecret(result.job_secret));
  } else {
    SHARDD_ASSIGN_OR_RETURN(result.job_secret, ReadJobSecret());
  }
  SHARDD_ASSIGN_OR_RETURN(result.timeout, TimeoutOf("attach", options->timeout_ms));
  if (options->daemon_wait_ms < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("attach: daemon_wait_ms is out of range (got ", options->daemon_wait_ms, ", want 0 or more)"));
  }
  if (const int64_t ms = options->daemon_wait_ms > 0 ? options->daemon_wait_ms : environment.daemon_wait_ms; ms > 0) {
    result.daemon_wait = absl::Milliseconds(ms);
  }
  if (environment.grace_ms == 0) {  // else it says how long the job is kept
    result.launcher.set_start_ticks(LauncherStartTicks());
    result.launcher.set_alone(options->ends_with_launcher != 0);
  }
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

absl::Status ExtendJob(shardd_job* job, const char* spec_json, int32_t* extended) {
  SHARDD_RETURN_IF_ERROR(CheckNotNull("extend_job", "extended", extended));
  *extended = 0;
  SHARDD_RETURN_IF_ERROR(CheckJob("extend_job", job));
  SHARDD_ASSIGN_OR_RETURN(const LaunchEnvironment environment, ReadLaunchEnvironment());
  SHARDD_ASSIGN_OR_RETURN(v1::JobSpec spec, ParseSpecJson(spec_json, environment));
  SHARDD_ASSIGN_OR_RETURN(const bool is_another, job->impl->Extend(std::move(spec)));
  *extended = is_another ? 1 : 0;
  return absl::OkStatus();
}

}  // namespace
}  // namespace shardd::api

namespace api = shardd::api;
using api::ToC;

extern "C" {

int shardd_status_code(const shardd_status* status) { return status == nullptr ? 0 : status->code; }
const char* shardd_status_message(const shardd_status* status) {
  return status == nullptr ? "" : status->message.c_str();
}
void shardd_status_free(shardd_status* status) { delete status; }
const char* shardd_version(void) { return shardd::kVersion; }

shardd_status* shardd_attach(const shardd_attach_options* options, shardd_job** job) {
  return ToC(api::Attach(options, job));
}
shardd_status* shardd_reattach(shardd_job* job) {
  SHARDD_CHECKED(api::CheckJob("reattach", job), job->impl->Reattach());
}
shardd_status* shardd_extend_job(shardd_job* job, const char* spec_json, int32_t* extended) {
  return ToC(api::ExtendJob(job, spec_json, extended));
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

const void* shardd_trainer_state(const shardd_job* job, size_t* size_bytes) {
  if (size_bytes != nullptr) {
    *size_bytes = 0;
  }
  if (size_bytes == nullptr || !api::IsUsable(job)) {
    return nullptr;
  }
  const std::string& state = job->impl->attachment().trainer_state();
  *size_bytes = state.size();
  return state.data();
}
shardd_status* shardd_set_cuda_stream(shardd_job* job, void* stream) {
  SHARDD_CHECKED(shardd::api::CheckJob("set_cuda_stream", job),
                 shardd::SetCudaStream(job->impl->attachment(), job->impl->graphs(), stream));
}
shardd_status* shardd_clear_cuda_stream(shardd_job* job) {
  SHARDD_CHECKED(shardd::api::CheckJob("clear_cuda_stream", job),
                 shardd::ClearCudaStream(job->impl->attachment(), job->impl->graphs()));
}
shardd_status* shardd_begin_graph(shardd_job* job, int32_t* graph) {
  if (absl::Status status = shardd::api::CheckJob("begin_graph", job); !status.ok()) {
    return ToC(status);
  }
  if (absl::Status status = shardd::api::CheckNotNull("begin_graph", "graph", graph); !status.ok()) {
    return ToC(status);
  }
  const absl::StatusOr<int> begun = job->impl->graphs().Begin();
  if (begun.ok()) {
    *graph = *begun;
  }
  return ToC(begun.status());
}
shardd_status* shardd_end_graph(shardd_job* job) {
  SHARDD_CHECKED(shardd::api::CheckJob("end_graph", job), job->impl->graphs().End());
}
shardd_status* shardd_launch_graph(shardd_job* job, int32_t graph, void* cuda_graph_exec) {
  if (absl::Status status = shardd::api::CheckJob("launch_graph", job); !status.ok()) {
    return ToC(status);
  }
  SHARDD_CHECKED(shardd::api::CheckNotNull("launch_graph", "cuda_graph_exec", cuda_graph_exec),
                 job->impl->graphs().Launch(graph, cuda_graph_exec));
}
shardd_status* shardd_free_graph(shardd_job* job, int32_t graph) {
  SHARDD_CHECKED(shardd::api::CheckJob("free_graph", job), job->impl->graphs().Free(graph));
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
    job->impl->attachment().interrupt().Set(std::move(question));
  }
  return nullptr;
}

}  // extern "C"
