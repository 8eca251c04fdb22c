// The same training by one process without shardd.

#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "tests/torch/worker_step.h"

namespace shardd_test {
namespace {

using Json = nlohmann::json;

// Keeps fp32 values beside a model of lower precision, as the daemon does.
struct Master {
  at::Tensor stored;                  // what the optimizer updates
  at::Tensor used;                    // what forward and backward see
  std::vector<at::Tensor> sums = {};  // over ranks, by micro-batch, in fp32
};

}  // namespace

void TrainReference(const WorkerOptions& options) {
  auto net = std::make_shared<NetImpl>(options.model);
  const at::ScalarType dtype = options.dtype == "bf16" ? at::kBFloat16 : at::kFloat;
  std::vector<Master> masters;
  std::vector<at::Tensor> groups[2];
  std::vector<std::pair<std::string, at::Tensor>> named;
  std::map<const void*, at::Tensor> seen;
  for (auto& parameter : net->named_parameters()) {
    at::Tensor& stored = seen[parameter.value().unsafeGetTensorImpl()];
    if (stored.defined()) {
      named.emplace_back(parameter.key(), stored);  // tied: one parameter, under each of its names
      continue;
    }
    Master master{parameter.value().detach().clone().requires_grad_(parameter.value().requires_grad()),
                  parameter.value()};
    master.used.set_data(master.used.detach().to(dtype));
    groups[InSecondGroup(options, parameter.key()) ? 1 : 0].push_back(master.stored);
    stored = master.stored;
    named.emplace_back(parameter.key(), stored);
    masters.push_back(std::move(master));
  }
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::vector<torch::optim::OptimizerParamGroup> param_groups;
  for (int g = 0; g < (options.two_groups ? 2 : 1); ++g) {
    param_groups.emplace_back(groups[g]);
  }
  if (options.optimizer == "adamw") {
    optimizer = std::make_unique<torch::optim::AdamW>(param_groups);
  } else if (options.optimizer == "adam") {
    optimizer = std::make_unique<torch::optim::Adam>(param_groups);
  } else {
    optimizer = std::make_unique<torch::optim::SGD>(param_groups, torch::optim::SGDOptions(1e-2));
  }
  Json result;
  std::vector<std::vector<double>> losses(static_cast<size_t>(options.ranks));
  for (int step = 0; step < options.steps; ++step) {
    for (int rank = 0; rank < options.ranks; ++rank) {
      double sum = 0;
      for (int micro = 0; micro < options.accumulate; ++micro) {
        const Position at = PositionOf(options, rank, step, micro);
        const Batch batch = MakeBatch(at, dtype);
        batch.x.set_requires_grad(options.penalty > 0);
        const at::Tensor loss = Penalised(net->forward(batch.x, batch.index, batch.target, at) / options.accumulate,
                                          batch.x, options.penalty);
        sum += loss.item<double>();
        loss.backward();
        const at::NoGradGuard no_grad;
        for (Master& master : masters) {
          at::Tensor& gradient = master.used.mutable_grad();
          if (!gradient.defined()) {
            continue;
          }
          master.sums.resize(static_cast<size_t>(options.accumulate));
          at::Tensor& sum_of_ranks = master.sums[static_cast<size_t>(micro)];
          const at::Tensor part = gradient.to(at::kFloat);
          sum_of_ranks = sum_of_ranks.defined() ? sum_of_ranks + part : part;
          gradient = at::Tensor();
        }
      }
      losses[static_cast<size_t>(rank)].push_back(sum);
    }
    for (Master& master : masters) {
      for (const at::Tensor& sum : std::exchange(master.sums, {})) {
        if (!sum.defined()) {
          continue;
        }
        // What a reduction gives is a number of the dtype in which gradients are.
        const at::Tensor reduced = (sum / options.ranks).to(dtype).to(at::kFloat);
        at::Tensor& total = master.stored.mutable_grad();
        total = total.defined() ? total + reduced : reduced;
      }
    }
    if (options.clip > 0) {
      std::vector<at::Tensor> all = groups[0];
      all.insert(all.end(), groups[1].begin(), groups[1].end());
      torch::nn::utils::clip_grad_norm_(all, options.clip, std::stod(options.norm));
    }
    for (size_t g = 0; g < optimizer->param_groups().size(); ++g) {
      const shardd_hyperparameters hyper = Hyper(options, step, static_cast<int>(g));
      if (options.optimizer == "adamw") {
        SetHyper(hyper, &static_cast<torch::optim::AdamWOptions&>(optimizer->param_groups()[g].options()));
      } else if (options.optimizer == "adam") {
        auto& target = static_cast<torch::optim::AdamOptions&>(optimizer->param_groups()[g].options());
        target.lr(hyper.lr).weight_decay(hyper.weight_decay).betas({hyper.beta1, hyper.beta2}).eps(hyper.eps);
      } else {
        auto& target = static_cast<torch::optim::SGDOptions&>(optimizer->param_groups()[g].options());
        target.lr(hyper.lr).weight_decay(hyper.weight_decay).momentum(hyper.momentum).nesterov(true);
      }
    }
    optimizer->step();
    optimizer->zero_grad();
    const at::NoGradGuard no_grad;
    for (Master& master : masters) {
      master.used.copy_(master.stored);
    }
  }
  const at::NoGradGuard no_grad;
  const Position at{0, 0, 0};
  const Batch batch = MakeBatch(at, dtype);
  result["evaluation"] = net->forward(batch.x, batch.index, batch.target, at).item<double>();
  for (const auto& [fqn, tensor] : named) {
    result["parameters"][fqn] = ToJson(tensor);
  }
  result["losses"] = losses;
  WriteJson(options.out, result);
}

}  // namespace shardd_test
