#include "client/torch/adaptor.h"

#include "client/torch/autograd_nodes.h"
#include "client/torch/job_spec.h"
#include "client/torch/status_error.h"

namespace shardd {

Status ShardedModule::Shard(std::shared_ptr<torch::nn::Module> module, const ShardOptions& options,
                            std::unique_ptr<ShardedModule>* sharded) {
  if (module == nullptr) {
    return Status(Code::kInvalidArgument, "shard module: it is null");
  }
  return internal::NoThrow("shard module", [&] { return DoShard(std::move(module), options, sharded); });
}

Status ShardedModule::DoShard(std::shared_ptr<torch::nn::Module> module, const ShardOptions& options,
                              std::unique_ptr<ShardedModule>* sharded) {
  Job::Options attach;
  Status status = JobSpecJson(*module, options, &attach.spec_json);
  if (!status.ok()) {
    return status;
  }
  attach.rank = options.rank;
  attach.address = options.address;
  attach.node = options.nodes.own;
  attach.replace = options.replace;
  attach.timeout_ms = options.timeout_ms;
  std::unique_ptr<Job> job;
  status = Job::Attach(attach, &job);
  if (!status.ok()) {
    return status;
  }
  internal::ShardedState::Options state_options;
  state_options.prefetch_on_begin = options.backward_prefetch == BackwardPrefetch::kPre;
  state_options.float8_gathers = options.mixed_precision.float8_gathers;
  state_options.prefetch_on_end = options.backward_prefetch == BackwardPrefetch::kPost;
  auto state = std::make_shared<internal::ShardedState>(std::move(job), state_options);
  std::vector<std::pair<std::string, at::Tensor>> parameters;
  for (const auto& entry : module->named_modules()) {
    const std::string prefix = entry.key().empty() ? "" : entry.key() + ".";
    // Not named_parameters of the root: tied parameters have to be found under each of their names.
    for (const auto& parameter : entry.value()->named_parameters(/*recurse=*/false)) {
      parameters.emplace_back(prefix + parameter.key(), parameter.value());
    }
  }
  status = state->Bind(parameters);
  if (status.ok()) {
    status = state->GiveInitialValues(/*writer=*/0);
  }
  if (!status.ok()) {
    return status;
  }
  state->Adopt();
  sharded->reset(new ShardedModule(std::move(module), std::move(state)));
  return status;
}

ShardedModule::ShardedModule(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<internal::ShardedState> state)
    : module_(std::move(module)), state_(std::move(state)) {
  for (const auto& entry : module_->named_modules()) {
    const int32_t group = state_->job()->FindGroup(entry.key().empty() ? "(root)" : entry.key());
    if (group >= 0) {
      groups_.emplace(entry.value().get(), group);
    }
  }
}

ShardedModule::~ShardedModule() {
  // Graphs may outlive this; they hold the state weakly and find it gone.
  (void)state_->TakeJob();
}

int32_t ShardedModule::GroupOf(const torch::nn::Module* module) const {
  const auto it = groups_.find(module);
  return it == groups_.end() ? -1 : it->second;
}

std::shared_ptr<internal::Use> ShardedModule::Begin(int32_t group, const std::vector<at::Tensor*>& inputs) {
  std::shared_ptr<internal::Use> use = state_->BeginForward(group);
  if (at::GradMode::is_enabled()) {
    internal::PassInputs(use, inputs);
  }
  return use;
}

void ShardedModule::End(const std::shared_ptr<internal::Use>& use, const std::vector<at::Tensor>& outputs) {
  state_->EndForward(use, at::GradMode::is_enabled() && internal::HookOutputs(use, outputs));
}

void ShardedModule::Abandon(internal::Use* use) { state_->AbandonForward(use); }

void ShardedModule::Backward(const at::Tensor& loss, bool last) {
  loss.backward();
  BackwardDone(last);
}

void ShardedModule::BackwardDone(bool last) { internal::ThrowIfError(state_->BackwardDone(last)); }

void ShardedModule::Step(const std::vector<shardd_hyperparameters>& groups, double max_grad_norm,
                         const std::string& trainer_state) {
  internal::ThrowIfError(state_->ReshardAll());  // forwards that had no backward may hold something still
  internal::ThrowIfError(state_->job()->Step(groups, max_grad_norm, trainer_state));
}

void ShardedModule::StepWith(const shardd_step_options& options) {
  internal::ThrowIfError(state_->ReshardAll());
  internal::ThrowIfError(state_->job()->StepWith(options));
}

Status ShardedModule::Try(const std::function<void()>& body) {
  try {
    body();
  } catch (const StatusError& error) {
    return error.status();
  }
  return Status();
}

Status ShardedModule::Reattach() {
  Status status = internal::NoThrow("reattach", [&] { return state_->Reattach(); });
  if (status.ok() && job().info().version == 0) {
    return Status(Code::kDataLoss,
                  "reattach: the job is gone and was made anew without parameters; start from the beginning");
  }
  return status;
}

Status ShardedModule::Finish() {
  std::unique_ptr<Job> job = state_->TakeJob();
  return job == nullptr ? Status() : job->Finish();
}

}  // namespace shardd
