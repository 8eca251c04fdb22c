#include "client/python/extension/nodes.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdlib>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "client/python/extension/errors.h"

namespace shardd::python {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

// Compiled autograd asks each node and hook of a graph for its arguments before anything runs.
[[noreturn]] void RefuseCompiledAutograd() {
  Check(Status(Code::kUnimplemented,
               "backward of a fully sharded module: compiled autograd (torch._dynamo.config.compiled_autograd) would "
               "trace past the daemon; turn it off, torch.compile itself is served"));
  std::abort();  // not reached
}

std::shared_ptr<Unit> Live(const std::weak_ptr<Unit>& weak) {
  std::shared_ptr<Unit> unit = weak.lock();
  if (unit == nullptr) {
    Check(Status(Code::kFailedPrecondition, "backward of a fully sharded module: the module is gone"));
  }
  return unit;
}

struct PostBackwardNode : public Node {
  PostBackwardNode(std::weak_ptr<Unit> owner, uint64_t made_in) : unit(std::move(owner)), generation(made_in) {}
  variable_list apply(variable_list&& gradients) override {
    Live(unit)->BackwardReachedInputs(generation);
    return std::move(gradients);
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { RefuseCompiledAutograd(); }
  std::string name() const override { return "ShardedModulePostBackward"; }
  const std::weak_ptr<Unit> unit;
  const uint64_t generation;
};

struct AccumulatorNode : public Node {
  // The highest sequence number, as torch's own accumulator has: it runs as soon as its gradient is complete.
  AccumulatorNode(std::weak_ptr<Unit> owner, size_t index)
      : Node(std::numeric_limits<uint64_t>::max()), unit(std::move(owner)), param(index) {}
  variable_list apply(variable_list&& gradients) override {
    if (gradients[0].defined()) {
      const std::shared_ptr<Unit> owner = Live(unit);
      if (owner->life().training() == fsdp::Training::kIdle) {
        owner->BeginHiddenBackward();
      }
      owner->gradients().OnGradient(param, gradients[0]);
    }
    return {};
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { RefuseCompiledAutograd(); }
  std::string name() const override { return "ShardedGradientAccumulator"; }
  const std::weak_ptr<Unit> unit;
  const size_t param;
};

struct OutputHook : public torch::autograd::FunctionPreHook {
  OutputHook(std::weak_ptr<Unit> owner, uint64_t made_in) : unit(std::move(owner)), generation(made_in) {}
  variable_list operator()(const variable_list& gradients) override {
    Live(unit)->PreBackward(generation);
    return gradients;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { RefuseCompiledAutograd(); }
  const std::weak_ptr<Unit> unit;
  const uint64_t generation;
};

}  // namespace

at::Tensor PostBackwardInputs::Pass(const at::Tensor& input) {
  if (node_ == nullptr) {
    node_ = MakeNode<PostBackwardNode>(unit_, generation_);
  }
  node_->add_next_edge(torch::autograd::impl::gradient_edge(input));
  // Shares storage and version counter, so an in-place change is still seen by whoever saved the original.
  at::Tensor alias = input.detach();
  torch::autograd::set_history(alias, node_);
  return alias;
}

void HookOutput(const at::Tensor& output, std::weak_ptr<Unit> unit, uint64_t generation) {
  if (const auto& node = output.grad_fn(); node != nullptr) {
    // As Tensor.register_hook, but for what it says to compiled autograd.
    node->add_tensor_pre_hook(std::make_unique<OutputHook>(std::move(unit), generation));
    return;
  }
  output.register_hook(
      [unit = std::move(unit), generation](const at::TensorBase&) { Live(unit)->PreBackward(generation); });
}

NodePtr MakeAccumulator(std::weak_ptr<Unit> unit, size_t param) {
  return MakeNode<AccumulatorNode>(std::move(unit), param);
}

}  // namespace shardd::python
