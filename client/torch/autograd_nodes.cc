#include "client/torch/autograd_nodes.h"

#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <limits>
#include <string>
#include <utility>

namespace shardd::internal {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

std::shared_ptr<ShardedState> StateOf(const std::weak_ptr<ShardedState>& state) {
  std::shared_ptr<ShardedState> owner = state.lock();
  if (owner == nullptr) {
    throw StatusError(Status(Code::kFailedPrecondition, "backward of a sharded module: the ShardedModule is gone"));
  }
  return owner;
}

struct EndOfBackward : public Node {
  explicit EndOfBackward(std::shared_ptr<Use> forward_use) : use(std::move(forward_use)) {}
  variable_list apply(variable_list&& gradients) override {
    StateOf(use->state)->EndBackward(use.get());
    if (at::GradMode::is_enabled()) {
      (void)HookOutputs(use, gradients);  // of the graph that this backward has made, whose backward comes later
    }
    return std::move(gradients);
  }
  std::string name() const override { return "ShardedModuleEndOfBackward"; }
  const std::shared_ptr<Use> use;
};

struct GradientAccumulator : public Node {
  // The highest sequence number, as torch's own accumulator has: it runs as soon as its gradient is complete.
  GradientAccumulator(const std::shared_ptr<ShardedState>& owner, int32_t index)
      : Node(std::numeric_limits<uint64_t>::max()), state(owner), param(index) {}
  variable_list apply(variable_list&& gradients) override {
    if (gradients[0].defined()) {
      StateOf(state)->OnGradient(param, gradients[0]);
    }
    return {};
  }
  std::string name() const override { return "ShardedGradientAccumulator"; }
  const std::weak_ptr<ShardedState> state;
  const int32_t param;
};

}  // namespace

void PassInputs(const std::shared_ptr<Use>& use, const std::vector<at::Tensor*>& inputs) {
  NodePtr node;
  for (at::Tensor* input : inputs) {
    if (!input->defined() || !input->requires_grad()) {
      continue;
    }
    if (node == nullptr) {
      node = MakeNode<EndOfBackward>(use);
    }
    node->add_next_edge(torch::autograd::impl::gradient_edge(*input));
    // Shares storage and version counter, so an in-place change is still seen by whoever saved the original.
    at::Tensor alias = input->detach();
    torch::autograd::set_history(alias, node);
    *input = std::move(alias);
  }
  if (node != nullptr) {
    use->awaits_end = true;
    ++StateOf(use->state)->AwaitingEnd(use->group);
  }
}

bool HookOutputs(const std::shared_ptr<Use>& use, const std::vector<at::Tensor>& outputs) {
  bool any = false;
  for (const at::Tensor& output : outputs) {
    if (output.defined() && output.requires_grad()) {
      output.register_hook([use](const at::TensorBase&) { StateOf(use->state)->BeginBackward(use.get()); });
      any = true;
    }
  }
  return any;
}

NodePtr InstallGradientAccumulator(const std::shared_ptr<ShardedState>& state, int32_t param,
                                   const at::Tensor& tensor) {
  NodePtr node = MakeNode<GradientAccumulator>(state, param);
  node->add_input_metadata(tensor);
  SetGradAccumulator(tensor, node);
  return node;
}

}  // namespace shardd::internal
