#include "tests/torch/worker.h"

#include <ATen/Parallel.h>
#include <signal.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "client/torch/module_tree.h"
#include "tests/torch/model.h"
#include "tests/torch/worker_options.h"

namespace shardd_test {
namespace {

using Json = nlohmann::json;

// Hyperparameters of optimizer group `group` at `step`.
shardd_hyperparameters Hyper(const WorkerOptions& options, int step, int group) {
  shardd_hyperparameters hyper{};
  const double scale = (group == 0 ? 1.0 : 0.5) * (1.0 - 0.01 * step);
  if (options.optimizer == "adamw") {
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
  shard.world_size = options.ranks;
  shard.rank = options.rank;
  shard.address = options.address;
  shard.timeout_ms = 60'000;
  shard.replace = options.replace;
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
                                                         : shardd::Strategy::kFullShard;
  shard.layout = options.layout == "dim0" ? shardd::ShardLayout::kDim0 : shardd::ShardLayout::kFlat;
  shard.unshard_mode = options.unshard_mode == "pooled" ? shardd::UnshardMode::kPooled : shardd::UnshardMode::kZeroCopy;
  shard.backward_prefetch = options.prefetch == "none"   ? shardd::BackwardPrefetch::kNone
                            : options.prefetch == "post" ? shardd::BackwardPrefetch::kPost
                                                         : shardd::BackwardPrefetch::kPre;
  shard.optimizer = options.optimizer == "adamw" ? shardd::OptimizerKind::kAdamW : shardd::OptimizerKind::kSgd;
  shard.momentum = options.optimizer == "sgd";
  if (options.dtype == "bf16") {
    shard.param_dtype = at::kBFloat16;
  }
  if (options.two_groups) {
    std::vector<std::string> fqns;
    for (const auto& parameter : model.named_parameters()) {
      if (InSecondGroup(options, parameter.key()) && parameter.value().requires_grad()) {
        fqns.push_back(parameter.key());
      }
    }
    shard.optimizer_groups = {fqns};
  }
  for (const auto& [fqn, mark] : options.left_out) {
    (mark == "ignored" ? shard.ignored : mark == "replicate" ? shard.replicate : shard.already_sharded).push_back(fqn);
  }
  if (!options.own_job.empty()) {
    shard.already_sharded.push_back(options.own_job);
  }
  return shard;
}

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
  void Step(const WorkerOptions& options, int step);

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

void OwnParameters::Step(const WorkerOptions& options, int step) {
  if (optimizer != nullptr) {
    SetHyper(Hyper(options, step, 0),
             &static_cast<torch::optim::AdamWOptions&>(optimizer->param_groups()[0].options()));
    optimizer->step();
    optimizer->zero_grad();
  }
}

Position PositionOf(const WorkerOptions& options, int rank, int step, int micro) {
  return {options.same_data ? 0 : rank, step, micro};
}

// Forward and backward of every micro-batch of one step; the mean loss.
double RunStep(const WorkerOptions& options, int step, NetImpl& net, shardd::ShardedModule* sharded) {
  const at::ScalarType dtype = options.dtype == "bf16" ? at::kBFloat16 : at::kFloat;
  std::vector<at::Tensor> losses;
  double sum = 0;
  for (int micro = 0; micro < options.accumulate; ++micro) {
    const Position at = PositionOf(options, options.rank, step, micro);
    const Batch batch = MakeBatch(at, dtype);
    losses.push_back(sharded->Run(net, batch.x, batch.index, batch.target, at) / options.accumulate);
    sum += losses.back().item<double>();
    if (!options.overlap) {
      sharded->Backward(losses.back(), micro + 1 == options.accumulate);
    }
  }
  if (step == options.kill_at) {
    raise(SIGKILL);
  }
  for (int micro = 0; options.overlap && micro < options.accumulate; ++micro) {
    sharded->Backward(losses[static_cast<size_t>(micro)], micro + 1 == options.accumulate);
  }
  return sum;
}

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
      sharded->Step(groups, options.clip, "step " + std::to_string(step + 1));
    });
    if (status.ok() && step + 1 == options.steps) {
      status = sharded->WaitStep();
    }
    if (status.aborted()) {
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
  if (!(status = sharded->CopyFullParameters(&parameters)).ok()) {
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

// Keeps fp32 values beside a model of lower precision, as the daemon does.
struct Master {
  at::Tensor stored;  // what the optimizer updates
  at::Tensor used;    // what forward and backward see
};

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
        const at::Tensor loss = net->forward(batch.x, batch.index, batch.target, at) / options.accumulate;
        sum += loss.item<double>();
        loss.backward();
        const at::NoGradGuard no_grad;
        for (Master& master : masters) {
          at::Tensor& gradient = master.used.mutable_grad();
          if (!gradient.defined()) {
            continue;
          }
          const at::Tensor part = gradient.to(at::kFloat) / options.ranks;
          at::Tensor& total = master.stored.mutable_grad();
          total = total.defined() ? total + part : part;
          gradient = at::Tensor();
        }
      }
      losses[static_cast<size_t>(rank)].push_back(sum);
    }
    if (options.clip > 0) {
      std::vector<at::Tensor> all = groups[0];
      all.insert(all.end(), groups[1].begin(), groups[1].end());
      torch::nn::utils::clip_grad_norm_(all, options.clip);
    }
    for (size_t g = 0; g < optimizer->param_groups().size(); ++g) {
      const shardd_hyperparameters hyper = Hyper(options, step, static_cast<int>(g));
      if (options.optimizer == "adamw") {
        SetHyper(hyper, &static_cast<torch::optim::AdamWOptions&>(optimizer->param_groups()[g].options()));
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

// What the module's tensors are outside and inside a forward.
shardd::Status Probe(const WorkerOptions& options) {
  auto net = std::make_shared<NetImpl>(options.model);
  const at::Tensor before = net->cells[1]->b->weight;
  std::unique_ptr<shardd::ShardedModule> sharded;
  shardd::Status status = shardd::ShardedModule::Shard(net, MakeShardOptions(options, *net), &sharded);
  if (!status.ok()) {
    return status;
  }
  net->sharded = sharded.get();
  Json result;
  const auto attempt = [&](const char* what, const std::function<void()>& body) {
    try {
      body();
      result["raised"][what] = "";
    } catch (const std::exception& error) {
      result["raised"][what] = error.what();
    }
  };
  const at::Tensor view = net->cells[1]->b->weight.t();
  attempt("add", [&] { (void)(net->cells[1]->b->weight + 1); });
  attempt("matmul of a view", [&] { (void)at::mm(at::ones({2, view.size(0)}), view); });
  attempt("item", [&] { (void)net->in->bias[0].item<float>(); });
  attempt("clone", [&] { (void)net->cells[1]->b->weight.clone(); });
  attempt("forward without Run", [&] { (void)net->cells[1]->forward(at::ones({2, 15}), true); });
  result["same tensor"] = before.is_same(net->cells[1]->b->weight);
  std::set<const void*> storages;
  for (const auto& parameter : net->named_parameters()) {
    const at::Tensor& tensor = parameter.value();
    result["exact size"][parameter.key()] =
        tensor.storage().nbytes() == tensor.nbytes() && tensor.storage_offset() == 0;
    storages.insert(tensor.storage().unsafeGetStorageImpl());
  }
  result["storages"] = storages.size();
  result["parameters"] = net->named_parameters().size();
  // After a whole step everything is closed again, .grad was never used, and a graph of before a Reattach is dead.
  status = shardd::ShardedModule::Try([&] {
    (void)RunStep(options, 0, *net, sharded.get());
    sharded->Step({Hyper(options, 0, 0)});
  });
  if (!status.ok() || !(status = sharded->WaitStep()).ok()) {
    return status;
  }
  attempt("add after a step", [&] { (void)(net->cells[1]->b->weight + 1); });
  bool any_grad = false;
  for (const at::Tensor& parameter : net->parameters()) {
    any_grad = any_grad || parameter.grad().defined();
  }
  result["any grad"] = any_grad;
  // A graph that survives the module finds an end.
  const Batch batch = MakeBatch({}, at::kFloat);
  at::Tensor loss = sharded->Run(*net, batch.x, batch.index, batch.target, Position());
  if (!(status = sharded->Finish()).ok()) {
    return status;
  }
  attempt("backward after finish", [&] { loss.backward(); });
  sharded.reset();
  attempt("backward without module", [&] { loss.backward(); });
  attempt("add after finish", [&] { (void)(net->cells[1]->b->weight + 1); });
  loss = at::Tensor();
  WriteJson(options.out, result);
  return status;
}

// What Shard refuses, as "code text", and that it leaves the module as it was.
shardd::Status Refusals(const WorkerOptions& options) {
  Json result;
  std::unique_ptr<shardd::ShardedModule> sharded;
  int job = 0;
  const auto attempt = [&](const char* what, const std::shared_ptr<torch::nn::Module>& module,
                           const std::function<void(shardd::ShardOptions*)>& change) {
    shardd::ShardOptions shard;
    if (module != nullptr) {
      shard = MakeShardOptions(options, *module);
    }
    shard.job_name += "_refused" + std::to_string(job++);
    change(&shard);
    std::unique_ptr<shardd::ShardedModule> refused;
    const shardd::Status status = shardd::ShardedModule::Shard(module, shard, &refused);
    result["refused"][what] = std::to_string(static_cast<int>(status.code())) + " " + status.message();
    return status.ok();
  };
  const auto nothing = [](shardd::ShardOptions*) {};
  auto net = std::make_shared<NetImpl>(options.model);
  attempt("null", nullptr, nothing);
  attempt("unknown", net, [](shardd::ShardOptions* shard) { shard->ignored = {"cell7"}; });
  attempt("twice", net, [](shardd::ShardOptions* shard) { shard->ignored = shard->replicate = {"cell1"}; });
  attempt("root", net, [](shardd::ShardOptions* shard) { shard->ignored = {""}; });
  attempt("tied", net, [](shardd::ShardOptions* shard) { shard->ignored = {"cell0"}; });
  attempt("name that is no text", net, [](shardd::ShardOptions* shard) { shard->job_name = "\xff\xfe"; });
  auto sparse = std::make_shared<torch::nn::Module>();
  sparse->register_parameter("weight", at::zeros({3, 4}).to_sparse(), /*requires_grad=*/false);
  attempt("sparse", sparse, nothing);
  result["still usable"] = net->cells[0]->b->weight.sum().item<float>() != 0;

  shardd::Status status = shardd::ShardedModule::Shard(net, MakeShardOptions(options, *net), &sharded);
  if (!status.ok()) {
    return status;
  }
  attempt("again", net, nothing);
  attempt("a part of it", net->cells[1], nothing);
  auto around = std::make_shared<torch::nn::Module>();
  around->register_module("inner", net);
  attempt("around it", around, nothing);
  // The refused ones have not touched it.
  net->sharded = sharded.get();
  status = shardd::ShardedModule::Try([&] { (void)RunStep(options, 0, *net, sharded.get()); });
  if (!status.ok() || !(status = sharded->Finish()).ok()) {
    return status;
  }
  attempt("after finish", net, nothing);
  sharded.reset();
  attempt("after its end", net, nothing);
  WriteJson(options.out, result);
  return status;
}

}  // namespace

int RunWorker(const std::string& options_json) {
  const WorkerOptions options = FromJson(options_json);
  at::set_num_threads(1);
  if (options.address.empty()) {
    TrainReference(options);
    return 0;
  }
  const shardd::Status status = options.mode == "probe"      ? Probe(options)
                                : options.mode == "refusals" ? Refusals(options)
                                                             : TrainSharded(options);
  if (!status.ok()) {
    std::fprintf(stderr, "worker rank %d: %s\n", options.rank, status.message().c_str());
    return 1;
  }
  return 0;
}

}  // namespace shardd_test
