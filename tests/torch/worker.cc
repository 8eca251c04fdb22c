#include "tests/torch/worker.h"

#include <ATen/Parallel.h>

#include <cstdio>
#include <memory>
#include <utility>
#include <vector>

#include "tests/torch/model.h"
#include "tests/torch/worker_options.h"
#include "tests/torch/worker_step.h"

namespace shardd_test {
namespace {

using Json = nlohmann::json;

// What the trainer updates itself: the parameters that the options leave out, with torch's optimizer.
struct OwnParameters {
  OwnParameters(const WorkerOptions& options, const torch::nn::Module& model) {
    for (const auto& parameter : model.named_parameters()) {
      for (const auto& [fqn, mark] : options.left_out) {
        if (parameter.key() == fqn || parameter.key().starts_with(fqn + ".")) {
          named.emplace_back(parameter.key(), parameter.value());
          tensors.push_back(parameter.value());
        }
      }
    }
    if (!tensors.empty()) {
      optimizer = std::make_unique<torch::optim::AdamW>(tensors);
    }
  }
  void Step(const WorkerOptions& options, int step) {
    if (optimizer != nullptr) {
      SetHyper(Hyper(options, step, 0),
               &static_cast<torch::optim::AdamWOptions&>(optimizer->param_groups()[0].options()));
      optimizer->step();
      optimizer->zero_grad();
    }
  }

  std::vector<std::pair<std::string, at::Tensor>> named;
  std::vector<at::Tensor> tensors;
  std::unique_ptr<torch::optim::AdamW> optimizer;
};

// A cell in a job of its own, beside the job of the rest.
struct OwnJob {
  shardd::Status Shard(const WorkerOptions& options, NetImpl* net) {
    if (options.own_job.empty()) {
      return {};
    }
    for (const auto& cell : net->cells) {
      if (net->named_children()[options.own_job] == cell) {
        shardd::ShardOptions own = MakeShardOptions(options, *cell);
        own.job_name += "_own";
        own.already_sharded.clear();
        shardd::Status status = shardd::ShardedModule::Shard(cell, own, &sharded);
        if (!status.ok()) {
          return status;
        }
        net->others[cell.get()] = sharded.get();
      }
    }
    return {};
  }
  std::unique_ptr<shardd::ShardedModule> sharded;
};

shardd::Status TrainSharded(const WorkerOptions& options) {
  auto net = std::make_shared<NetImpl>(options.model);
  OwnJob own_job;
  shardd::Status status = own_job.Shard(options, net.get());
  if (!status.ok()) {
    return status;
  }
  std::unique_ptr<shardd::ShardedModule> sharded;
  status = shardd::ShardedModule::Shard(net, MakeShardOptions(options, *net), &sharded);
  if (!status.ok()) {
    return status;
  }
  net->sharded = sharded.get();
  net->recompute = options.recompute;
  OwnParameters own(options, *net);
  Json result;
  result["first_step"] = sharded->job().info().committed_step;
  std::vector<double> losses(static_cast<size_t>(options.steps), 0);
  int reattached = 0;
  for (int step = static_cast<int>(sharded->job().info().committed_step); step < options.steps;) {
    status = shardd::ShardedModule::Try([&] {
      losses[static_cast<size_t>(step)] = RunStep(options, step, *net, sharded.get());
      std::vector<shardd_hyperparameters> groups = {Hyper(options, step, 0)};
      if (options.two_groups) {
        groups.push_back(Hyper(options, step, 1));
      }
      if (own_job.sharded != nullptr) {
        own_job.sharded->BackwardDone();
        own_job.sharded->Step(groups);
      }
      own.Step(options, step);
      const std::string state = "step " + std::to_string(step + 1);
      shardd_step_options step_options{};
      step_options.groups = groups.data();
      step_options.group_count = static_cast<int32_t>(groups.size());
      step_options.max_grad_norm = options.clip;
      step_options.norm_type = std::stod(options.norm);
      step_options.state = state.data();
      step_options.state_bytes = state.size();
      sharded->StepWith(step_options);
    });
    if (status.ok() && step + 1 == options.steps) {
      status = sharded->WaitStep();
    }
    if (status.aborted() || status.code() == shardd::Code::kUnavailable) {
      if (!(status = sharded->Reattach()).ok()) {
        return status;
      }
      ++reattached;
      step = static_cast<int>(sharded->job().info().committed_step);
      if (step > 0 && sharded->job().trainer_state() != "step " + std::to_string(step)) {
        return {shardd::Code::kInternal,
                "trainer state is not of the committed step: " + sharded->job().trainer_state()};
      }
      continue;
    }
    if (!status.ok()) {
      return status;
    }
    ++step;
  }
  // Evaluation without gradients sees the final parameters and leaves nothing unsharded.
  {
    const at::NoGradGuard no_grad;
    const Position at{0, 0, 0};
    const Batch batch = MakeBatch(at, options.dtype == "bf16" ? at::kBFloat16 : at::kFloat);
    result["evaluation"] = sharded->Run(*net, batch.x, batch.index, batch.target, at).item<double>();
  }
  std::vector<std::pair<std::string, at::Tensor>> parameters;
  status = sharded->CopyFullParameters(&parameters);
  if (status.code() == shardd::Code::kUnimplemented) {
    result["copy refused"] = status.message();
  } else if (!status.ok()) {
    return status;
  }
  for (const auto& [fqn, tensor] : parameters) {
    result["managed"].push_back(fqn);
    result["parameters"][fqn] = ToJson(tensor);
  }
  for (const auto& [fqn, tensor] : own.named) {
    result["parameters"][fqn] = ToJson(tensor);
  }
  if (own_job.sharded != nullptr) {
    if (!(status = own_job.sharded->CopyFullParameters(&parameters)).ok()) {
      return status;
    }
    for (const auto& [fqn, tensor] : parameters) {
      result["parameters"][options.own_job + "." + fqn] = ToJson(tensor);
    }
    if (!(status = own_job.sharded->Finish()).ok()) {
      return status;
    }
  }
  result["losses"] = losses;
  result["reattached"] = reattached;
  WriteJson(options.out, result);
  return sharded->Finish();
}

}  // namespace

int RunWorker(const std::string& options_json) {
  const WorkerOptions options = FromJson(options_json);
  at::set_num_threads(1);
  if (options.address.empty()) {
    TrainReference(options);
    return 0;
  }
  const shardd::Status status = options.mode == "probe"         ? Probe(options)
                                : options.mode == "refusals"    ? Refusals(options)
                                : options.mode == "full_params" ? FullParams(options)
                                : options.mode == "edit"        ? Edit(options)
                                                                : TrainSharded(options);
  if (!status.ok()) {
    std::fprintf(stderr, "worker rank %d: %s\n", options.rank, status.message().c_str());
    return 1;
  }
  return 0;
}

}  // namespace shardd_test
