#include "client/python/extension/nodes.h"

#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <limits>
#include <string>
#include <utility>

#include "client/python/extension/errors.h"

namespace shardd::python {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

std::shared_ptr<Unit> Live(const std::weak_ptr<Unit>& weak, uint64_t generation) {
  std::shared_ptr<Unit> unit = weak.lock();
  if (unit == nullptr || !unit->bound()) {
    Check(Status(Code::kFailedPrecondition, "backward of a fully sharded module: the module is gone"));
  }
  if (generation != 0 && generation != unit->generation()) {
    Check(Status(Code::kFailedPrecondition,
                 "backward of a fully sharded module: its forward was run before the job was attached again; run the "
                 "step from its beginning"));
  }
  return unit;
}

struct PostBackwardNode : public Node {
  PostBackwardNode(std::weak_ptr<Unit> owner, uint64_t made_in) : unit(std::move(owner)), generation(made_in) {}
  variable_list apply(variable_list&& gradients) override {
    Live(unit, generation)->PostBackward();
    return std::move(gradients);
  }
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
      Live(unit, 0)->OnGradient(param, gradients[0]);
    }
    return {};
  }
  std::string name() const override { return "ShardedGradientAccumulator"; }
  const std::weak_ptr<Unit> unit;
  const size_t param;
};

}  // namespace

at::Tensor PostBackwardInputs::Pass(const at::Tensor& input) {
  if (node_ == nullptr) {
    node_ = c10::make_intrusive<PostBackwardNode>(unit_, generation_);
  }
  node_->add_next_edge(torch::autograd::impl::gradient_edge(input));
  // Shares storage and version counter, so an in-place change is still seen by whoever saved the original.
  at::Tensor alias = input.detach();
  torch::autograd::set_history(alias, node_);
  return alias;
}

void HookOutput(const at::Tensor& output, std::weak_ptr<Unit> unit, uint64_t generation) {
  output.register_hook(
      [unit = std::move(unit), generation](const at::TensorBase&) { Live(unit, generation)->PreBackward(); });
}

c10::intrusive_ptr<Node> MakeAccumulator(std::weak_ptr<Unit> unit, size_t param) {
  return c10::make_intrusive<AccumulatorNode>(std::move(unit), param);
}

}  // namespace shardd::python
