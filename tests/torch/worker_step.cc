#include "tests/torch/worker_step.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <utility>
#include <vector>

#include "client/torch/module_tree.h"

namespace shardd_test {

using Json = nlohmann::json;

shardd_hyperparameters Hyper(const WorkerOptions& options, int step, int group) {
  shardd_hyperparameters hyper{};
  const double scale = (group == 0 ? 1.0 : 0.5) * (1.0 - 0.01 * step);
  if (options.optimizer != "sgd") {
    hyper.lr = 2e-3 * scale;
    hyper.weight_decay = group == 0 ? 0.1 : 0;
    hyper.beta1 = 0.9;
    hyper.beta2 = 0.95;
    hyper.eps = 1e-4;  // a gradient of the size of a rounding error must not make a step of full size
  } else {
    hyper.lr = 2e-2 * scale;
    hyper.weight_decay = group == 0 ? 1e-3 : 0;
    hyper.momentum = 0.9;
    hyper.nesterov = 1;
  }
  return hyper;
}

bool InSecondGroup(const WorkerOptions& options, const std::string& fqn) {
  return options.two_groups && fqn.ends_with("bias");
}

shardd::ShardOptions MakeShardOptions(const WorkerOptions& options, const torch::nn::Module& model) {
  shardd::ShardOptions shard;
  shard.job_name = options.job;
  shard.world_size = options.ranks / static_cast<int>(std::max<size_t>(1, options.nodes.size()));
  shard.rank = options.rank % shard.world_size;
  shard.nodes.own = options.rank / shard.world_size;
  shard.nodes.addresses = options.nodes;
  shard.address = options.address;
  shard.timeout_ms = 60'000;
  shard.replace = options.replace;
  shard.mixed_precision.float8_gathers = options.float8_gathers;
  shard.strict_order = options.strict_order;
  if (options.by_name == options.rank) {
    for (const auto& module : model.named_modules("", /*include_self=*/false)) {
      const std::string name = shardd::ModuleClassName(*module.value());
      if (name == "Cell" || name == "Table") {
        shard.fully_shard_fqns.push_back(module.key());
      }
    }
  } else {
    shard.fully_shard_classes = {"Cell", "Table"};
  }
  shard.strategy = options.strategy == "no_shard"        ? shardd::Strategy::kNoShard
                   : options.strategy == "shard_grad_op" ? shardd::Strategy::kShardGradOp
                   : options.strategy == "hybrid"        ? shardd::Strategy::kHybridShard
                                                         : shardd::Strategy::kFullShard;
  shard.layout = options.layout == "dim0" ? shardd::ShardLayout::kDim0 : shardd::ShardLayout::kFlat;
  if (options.unshard_mode == "pooled") {
    shard.unshard_mode = shardd::UnshardMode::kPooled;
  }
  shard.backward_prefetch = options.prefetch == "none"   ? shardd::BackwardPrefetch::kNone
                            : options.prefetch == "post" ? shardd::BackwardPrefetch::kPost
                                                         : shardd::BackwardPrefetch::kPre;
  shard.optimizer.kind = options.optimizer == "adamw"  ? shardd::OptimizerKind::kAdamW
                         : options.optimizer == "adam" ? shardd::OptimizerKind::kAdam
                                                       : shardd::OptimizerKind::kSgd;
  shard.optimizer.momentum = options.optimizer == "sgd";
  if (options.dtype == "bf16") {
    shard.mixed_precision.param_dtype = at::kBFloat16;
  }
  if (options.two_groups) {
    std::vector<std::string> fqns;
    for (const auto& parameter : model.named_parameters()) {
      if (InSecondGroup(options, parameter.key()) && parameter.value().requires_grad()) {
        fqns.push_back(parameter.key());
      }
    }
    shard.optimizer.groups = {fqns};
  }
  for (const auto& [fqn, mark] : options.left_out) {
    (mark == "ignored" ? shard.ignored : mark == "replicate" ? shard.replicate : shard.already_sharded).push_back(fqn);
  }
  if (!options.own_job.empty()) {
    shard.already_sharded.push_back(options.own_job);
  }
  return shard;
}

void WriteJson(const std::string& path, const Json& json) {
  std::ofstream(path + ".tmp") << json.dump();
  std::rename((path + ".tmp").c_str(), path.c_str());
}

Json ToJson(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.detach().to(at::kDouble).contiguous().view({-1});
  return std::vector<double>(flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel());
}

void SetHyper(const shardd_hyperparameters& hyper, torch::optim::AdamWOptions* target) {
  target->lr(hyper.lr).weight_decay(hyper.weight_decay).betas({hyper.beta1, hyper.beta2}).eps(hyper.eps);
}

Position PositionOf(const WorkerOptions& options, int rank, int step, int micro) {
  return {options.same_data ? 0 : rank, step, micro};
}

double RunStep(const WorkerOptions& options, int step, NetImpl& net, shardd::ShardedModule* sharded) {
  const at::ScalarType dtype = options.dtype == "bf16" ? at::kBFloat16 : at::kFloat;
  std::vector<at::Tensor> losses;
  double sum = 0;
  for (int micro = 0; micro < options.accumulate; ++micro) {
    const Position at = PositionOf(options, options.rank, step, micro);
    const Batch batch = MakeBatch(at, dtype);
    batch.x.set_requires_grad(options.penalty > 0);
    if (step == options.fail_at && micro == 0) {
      at::Tensor failing = sharded->Run(net, batch.x, batch.index, batch.target, at);
      try {
        failing.register_hook([](at::Tensor) -> at::Tensor { throw std::runtime_error("user code"); });
        failing.backward();
        throw std::logic_error("the backward did not fail");
      } catch (const std::runtime_error&) {
        const shardd::Status status = sharded->AbandonBackward();
        if (!status.ok()) {
          throw std::logic_error("abandon: " + status.message());
        }
      }
    }
    losses.push_back(Penalised(sharded->Run(net, batch.x, batch.index, batch.target, at) / options.accumulate, batch.x,
                               options.penalty));
    sum += losses.back().item<double>();
    if (!options.overlap) {
      sharded->Backward(losses.back(), micro + 1 == options.accumulate);
    }
  }
  if (step == options.kill_at) {
    (void)kill(options.victim > 0 ? options.victim : getpid(), SIGKILL);  // fails where the step is done again
  }
  for (int micro = 0; options.overlap && micro < options.accumulate; ++micro) {
    sharded->Backward(losses[static_cast<size_t>(micro)], micro + 1 == options.accumulate);
  }
  return sum;
}

}  // namespace shardd_test
