// Full parameters through the adaptor: read, and edited by rank 0 or by all.

#include <memory>
#include <utility>
#include <vector>

#include "tests/torch/worker_step.h"

namespace shardd_test {

using Json = nlohmann::json;
using shardd::ShardedModule;

namespace {

shardd::Status Shard(const WorkerOptions& options, const std::shared_ptr<NetImpl>& net,
                     std::unique_ptr<ShardedModule>* sharded) {
  shardd::Status status = ShardedModule::Shard(net, MakeShardOptions(options, *net), sharded);
  if (status.ok()) net->sharded = sharded->get();
  return status;
}

}  // namespace

// Gradients of one backward that no step has used yet; then values + 1 and gradients * 0 written back, and a step.
shardd::Status FullParams(const WorkerOptions& options) {
  auto net = std::make_shared<NetImpl>(options.model);
  std::unique_ptr<ShardedModule> sharded;
  shardd::Status status = Shard(options, net, &sharded);
  if (!status.ok()) return status;
  Json result;
  status = ShardedModule::Try([&] { (void)RunStep(options, 0, *net, sharded.get()); });
  ShardedModule::FullParamsOptions full;
  full.with_grads = true;
  full.rank0_only = options.strategy == "full_shard";
  if (status.ok()) {
    status = sharded->UnshardParams(full, [&](std::vector<ShardedModule::FullParameter>& parameters) {
      for (ShardedModule::FullParameter& parameter : parameters) {
        result["before"][parameter.fqn] = ToJson(parameter.value);
        result["has gradient"][parameter.fqn] = parameter.grad.defined();
        parameter.value.add_(1);
        if (parameter.grad.defined()) {
          parameter.grad.zero_();
        }
      }
    });
  }
  if (status.ok()) {
    shardd_hyperparameters hyper{};  // SGD, lr 1 and no decay: zero gradients change nothing
    hyper.lr = 1;
    status = ShardedModule::Try([&] { sharded->Step({hyper}); });
  }
  full = {};
  full.writeback = false;
  if (status.ok()) {
    status = sharded->UnshardParams(full, [&](std::vector<ShardedModule::FullParameter>& parameters) {
      for (const ShardedModule::FullParameter& parameter : parameters) {
        result["after"][parameter.fqn] = ToJson(parameter.value);
      }
    });
  }
  full.module = "cell1";
  full.recurse = false;
  if (status.ok()) {
    status = sharded->UnshardParams(full, [&](std::vector<ShardedModule::FullParameter>& parameters) {
      for (const ShardedModule::FullParameter& parameter : parameters) {
        result["of cell1"].push_back(parameter.fqn);
      }
    });
  }
  full.module = "nowhere";
  result["refused"] = sharded->UnshardParams(full, [](auto&) {}).message();
  WriteJson(options.out, result);
  return status.ok() ? sharded->Finish() : status;
}

// Behind a step, all ranks add one to every value.
shardd::Status Edit(const WorkerOptions& options) {
  auto net = std::make_shared<NetImpl>(options.model);
  std::unique_ptr<ShardedModule> sharded;
  shardd::Status status = Shard(options, net, &sharded);
  if (!status.ok()) return status;
  Json result;
  status = ShardedModule::Try([&] {
    (void)RunStep(options, 0, *net, sharded.get());
    sharded->Step({Hyper(options, 0, 0)});
  });
  if (status.ok()) {
    status = sharded->UnshardParams({}, [&](std::vector<ShardedModule::FullParameter>& parameters) {
      for (ShardedModule::FullParameter& parameter : parameters) {
        result["before"][parameter.fqn] = ToJson(parameter.value);
        parameter.value.add_(1);
      }
    });
  }
  ShardedModule::FullParamsOptions reading;
  reading.writeback = false;
  if (status.ok()) {
    status = sharded->UnshardParams(reading, [&](std::vector<ShardedModule::FullParameter>& parameters) {
      for (const ShardedModule::FullParameter& parameter : parameters) {
        result["after"][parameter.fqn] = ToJson(parameter.value);
      }
    });
  }
  reading.module = "(root)";
  if (status.ok()) {
    status = sharded->UnshardParams(reading, [&](std::vector<ShardedModule::FullParameter>& parameters) {
      result["beneath the root"] = parameters.size();
    });
  }
  ShardedModule::FullParamsOptions alone;
  alone.rank0_only = true;
  result["refused"] = sharded->UnshardParams(alone, [](auto&) {}).message();
  WriteJson(options.out, result);
  return status.ok() ? sharded->Finish() : status;
}

}  // namespace shardd_test
