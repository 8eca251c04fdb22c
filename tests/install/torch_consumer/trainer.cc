// A module sharded by the installed adaptor trains a few steps; the installed library starts the installed daemon.
#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <cstdio>
#include <memory>

#include "client/torch/adaptor.h"

namespace {

struct LineImpl : torch::nn::Module {
  LineImpl() {
    weight = register_parameter("weight", at::full({2, 3}, 0.5));
    bias = register_parameter("bias", at::zeros({2}));
  }
  at::Tensor forward(at::Tensor x) { return at::linear(x, weight, bias); }
  at::Tensor weight, bias;
};

shardd::Status Train(double* first, double* last) {
  auto line = std::make_shared<LineImpl>();
  shardd::ShardOptions options;
  options.job_name = "install_torch";
  options.world_size = 1;
  options.rank = 0;
  options.optimizer = shardd::OptimizerKind::kSgd;
  std::unique_ptr<shardd::ShardedModule> sharded;
  shardd::Status status = shardd::ShardedModule::Shard(line, options, &sharded);
  if (!status.ok()) {
    return status;
  }
  shardd_hyperparameters sgd{};
  sgd.lr = 0.1;
  status = shardd::ShardedModule::Try([&] {
    for (int step = 0; step < 10; ++step) {
      const at::Tensor loss = sharded->Run(*line, at::ones({4, 3})).square().mean();
      *last = loss.item<double>();
      *first = step == 0 ? *last : *first;
      sharded->Backward(loss);
      sharded->Step({sgd});
    }
  });
  return status.ok() ? sharded->Finish() : status;
}

}  // namespace

int main() {
  double first = 0;
  double last = 0;
  const shardd::Status status = Train(&first, &last);
  std::printf("code %d %s; loss %g to %g\n", static_cast<int>(status.code()), status.message().c_str(), first, last);
  return status.ok() && last < first / 10 ? 0 : 1;
}
