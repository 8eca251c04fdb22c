#include "client/python/extension/engine/engine.h"

#include <algorithm>
#include <utility>

#include "client/fsdp/gradient_slots.h"
#include "client/python/extension/errors.h"
#include "client/python/extension/unit.h"

namespace shardd::python {
namespace {

constexpr int64_t kDefaultTimeoutMs = 300'000;  // the library's own (shardd_attach_options.timeout_ms)

Status Take(shardd_status* status) { return Status::Take(status); }

std::vector<int32_t> ParamCounts(Job& job) {
  std::vector<int32_t> counts(static_cast<size_t>(job.info().group_count));
  for (size_t g = 0; g < counts.size(); ++g) {
    counts[g] = job.group(static_cast<int32_t>(g)).info().param_count;
  }
  return counts;
}

}  // namespace

std::shared_ptr<Engine> Engine::Attach(const std::string& spec_json, int rank, int node, const std::string& address,
                                       bool resumes, int64_t timeout_ms, int gpu, bool alone) {
  Job::Options options;
  options.spec_json = spec_json;
  options.rank = rank;
  options.node = node;
  options.address = address;
  options.replace = options.adopt = resumes;
  options.timeout_ms = timeout_ms;
  options.device_memory = gpu >= 0;
  options.ends_with_launcher = alone;
  const at::Device device = gpu < 0 ? at::Device(at::kCPU) : at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(gpu));
  std::unique_ptr<Job> job;
  {
    const NoGil no_gil;
    Check(Job::Attach(options, &job));
  }
  Check(Take(shardd_set_interrupt(job->c_job(), &PendingSignal, nullptr)));
  try {
    CheckDevice(job->info(), gpu);
  } catch (...) {
    (void)job->Finish();  // it was made for nothing
    throw;
  }
  std::shared_ptr<Engine> engine(new Engine(std::move(job), device));
  engine->stream_limit_ = std::chrono::milliseconds(timeout_ms > 0 ? timeout_ms : kDefaultTimeoutMs);
  return engine;
}

Engine::Engine(std::unique_ptr<Job> job, at::Device device)
    : job_(std::move(job)),
      device_(device),
      shell_(*this),
      groups_(shell_, ParamCounts(*job_),
              fsdp::SharedSlots(fsdp::GradientRanges(*job_), static_cast<size_t>(job_->info().group_count))) {
  if (job_->info().offloaded == 0) {
    state_device_ = device;
  }
}

Engine::~Engine() {
  // Waits for the daemon, at most some seconds.
  const py::gil_scoped_acquire gil;
  complete_partial_ = py::object();
  replaced_ = py::object();
  root_ = py::object();
  const NoGil no_gil;
  job_.reset();
}

Job& Engine::job() {
  if (job_ == nullptr) {
    Check(Status(Code::kFailedPrecondition, "use of a fully sharded module: its job is closed"));
  }
  if (!device_.is_cpu()) {
    FollowStream();
  }
  return *job_;
}

Job& Engine::session() {
  if (job_ == nullptr) {
    return job();  // which says so
  }
  return *job_;
}

void Engine::AddUnit(Unit* unit) {
  units_.push_back(unit);
  shell_.Add(*unit);
}

void Engine::RemoveUnit(const Unit* unit) {
  units_.erase(std::remove(units_.begin(), units_.end(), unit), units_.end());
  if (forward_root_ == unit) {
    forward_root_ = nullptr;
  }
  shell_.Remove(*unit);
  for (const int group : unit->groups()) {
    groups_.Forget(group);
  }
}

void Engine::Write(int param, const at::Tensor& rows, int64_t first) {
  const NoGil no_gil;
  const at::Tensor dense = rows.to(at::kCPU).contiguous();
  Check(job().WriteParameter(param, dense.const_data_ptr(), first, dense.numel()));
}

void Engine::WriteOptimizerState(int param, int state, const at::Tensor& rows, int64_t first) {
  const NoGil no_gil;
  const at::Tensor dense = rows.to(at::kCPU, at::kFloat).contiguous();
  Check(Take(
      shardd_write_optimizer_state(job().c_job(), param, state, dense.const_data_ptr<float>(), first, dense.numel())));
}

void Engine::WriteUpdateCount(int param, int64_t count) {
  const NoGil no_gil;
  Check(Take(shardd_write_update_count(job().c_job(), param, count)));
}

void Engine::Commit() {
  const NoGil no_gil;
  Check(job().CommitParameters());
}

void Engine::LoadMemory() {
  for (Unit* unit : units_) {
    unit->LoadMemory();
  }
}

void Engine::ReshardAll() {
  for (Unit* unit : units_) {
    unit->ToSharded();
  }
}

void Engine::SetUpdated(const std::vector<int>& params) {
  for (Unit* unit : units_) {
    for (const auto& shard : unit->shards_) {
      shard->updated = std::find(params.begin(), params.end(), shard->daemon_param) != params.end();
    }
  }
}

void Engine::AdoptState(int param, int state, const at::Tensor& local, bool copy_in) {
  for (Unit* unit : units_) {
    if (HeldShard* shard = unit->FindShard(param); shard != nullptr) {
      float* data = nullptr;
      {
        const NoGil no_gil;  // the first call maps the memory of all
        data = static_cast<float*>(shardd_optimizer_state_data(job().c_job(), param, state));
      }
      if (data == nullptr) {
        Check(Status(Code::kResourceExhausted, "keep optimizer state " + std::to_string(state) + " of \"" + shard->fqn +
                                                   "\": the job was opened without memory for it"));
      }
      shard->AdoptState(static_cast<size_t>(state), local, data + shard->first_element, copy_in);
      return;
    }
  }
}

Engine::StepResult Engine::Step(shardd_step_options options, const std::string& state) {
  ReshardAll();
  for (Unit* unit : units_) {
    unit->SettleGradients(/*stepping=*/true);
  }
  StepResult result;
  options.state = state.data();
  options.state_bytes = state.size();
  {
    const NoGil no_gil;
    Check(job().StepWith(options));
    const bool tells = options.max_grad_norm > 0 || options.loss_scale > 0;
    if (!tells && !device_.is_cpu() && device_ == state_device_ && job().info().stream_ordered != 0) {
      Check(job().AwaitStep());
      awaited_ = true;
      settled_ = false;
    } else {
      shardd_step_result c_result{};
      c_result.struct_size = sizeof(c_result);
      Check(job().WaitStep(&c_result));
      result = {c_result.committed_step, c_result.grad_norm, c_result.clip_factor, c_result.skipped != 0};
      settled_ = true;
    }
  }
  ++steps_;
  gradients_used_ = true;
  inside_pass_ = paused_ = pass_by_hand_ = written_ = false;  // the step has said so
  float* const counts =
      update_counts_.defined() && !result.skipped ? update_counts_.mutable_data_ptr<float>() : nullptr;
  for (Unit* unit : units_) {
    unit->EndStep(counts, /*in_trainers=*/false);
  }
  return result;
}

void Engine::Reattach() {
  ++generation_;
  forward_root_ = nullptr;
  final_queued_ = partial_backward_ = settled_ = inside_pass_ = paused_ = stepped_ = full_params_ = awaited_ = false;
  gradients_used_ = written_ = false;
  stepped_state_.clear();
  for (Unit* unit : units_) {
    unit->ForgetMemory();
  }
  SynchroniseStream();  // with what was copied out
  {
    const NoGil no_gil;
    Check(session().Reattach());
  }
  stream_.reset();
  LoadMemory();
}

bool Engine::WantsExtension() const {
  return extension_asked_ ||
         std::any_of(units_.begin(), units_.end(), [](const Unit* unit) { return unit->HasUnfrozen(); });
}

bool Engine::Extend(const std::string& spec_json) {
  ReshardAll();
  for (const Unit* unit : units_) {
    unit->CheckGradientsAreShown();
  }
  int32_t extended = 0;
  {
    const NoGil no_gil;
    Check(Take(shardd_extend_job(job().c_job(), spec_json.c_str(), &extended)));
  }
  extension_asked_ = false;
  return extended != 0;
}

void Engine::WaitForCommit() {
  if (awaited_) {
    const NoGil no_gil;
    Check(session().WaitStep());
    awaited_ = false;
  }
}

std::string Engine::Describe() {
  WaitForCommit();
  char* json = nullptr;
  {
    const NoGil no_gil;
    Check(Take(shardd_describe_job(session().c_job(), &json)));
  }
  std::string text = json;
  shardd_string_free(json);
  return text;
}

std::string Engine::trainer_state() {
  WaitForCommit();
  return session().trainer_state();
}
shardd_job_info Engine::info() {
  if (awaited_) {
    const NoGil no_gil;
    awaited_ = !session().WaitStep().ok();  // who asks after a failure is told of what was committed
  }
  return session().info();
}
int Engine::FindParam(const std::string& fqn) { return job().FindParameter(fqn); }
int Engine::FindGroup(const std::string& name) { return job().FindGroup(name); }

shardd_counters Engine::client_counters() {
  shardd_counters counters{};
  counters.struct_size = sizeof(counters);
  Check(Take(shardd_get_counters(job().c_job(), &counters)));
  return counters;
}

}  // namespace shardd::python
