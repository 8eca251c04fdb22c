#include <torch/nn/modules/linear.h>

#include <cstdio>
#include <memory>

#include "client/torch/adaptor.h"

struct BlockImpl : torch::nn::Module {
  BlockImpl() : linear(register_module("linear", torch::nn::Linear(32, 32))) {}
  at::Tensor forward(at::Tensor x) { return x + at::tanh(linear(x)); }
  torch::nn::Linear linear;
};
struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int i = 0; i < 4; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), std::make_shared<BlockImpl>()));
  }
  // Every fully sharded module is run by Run: libtorch has no module hooks.
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) x = sharded->Run(*block, x);
    return (x - 1).square().mean();
  }
  std::vector<std::shared_ptr<BlockImpl>> blocks;
  shardd::ShardedModule* sharded = nullptr;
};

int main() {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // a rank that is killed has printed what it said
  auto model = std::make_shared<NetImpl>();
  shardd::ShardOptions options;
  options.job_name = "torch-first";
  options.fully_shard_classes = {"Block"};
  options.optimizer.kind = shardd::OptimizerKind::kAdamW;
  std::unique_ptr<shardd::ShardedModule> sharded;  // from here on the parameters live in the daemon
  shardd::Status status = shardd::ShardedModule::Shard(model, options, &sharded);
  if (!status.ok()) return std::fprintf(stderr, "%s\n", status.message().c_str()), 1;
  model->sharded = sharded.get();

  shardd_hyperparameters adamw{};
  adamw.lr = 1e-2, adamw.beta1 = 0.9, adamw.beta2 = 0.999, adamw.eps = 1e-8;
  for (int64_t step = sharded->job().info().committed_step; status.ok() && step < 100;) {
    status = shardd::ShardedModule::Try([&] {
      torch::manual_seed(
          static_cast<uint64_t>(step * 1000 + sharded->job().info().rank));  // data is a function of the step
      const at::Tensor loss = sharded->Run(*model, torch::randn({8, 32}));
      sharded->Backward(loss);
      sharded->Step({adamw}, /*max_grad_norm=*/1.0);
      if (step % 20 == 0) std::printf("step %ld loss %.4f\n", static_cast<long>(step), loss.item<double>());
    });
    if (status.ok()) status = sharded->WaitStep();
    if (status.aborted()) status = sharded->Reattach();  // a rank died: nothing committed is lost
    step = sharded->job().info().committed_step;
  }
  if (status.ok()) status = sharded->Finish();
  return status.ok() ? 0 : (std::fprintf(stderr, "%s\n", status.message().c_str()), 1);
}
