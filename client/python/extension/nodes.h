#ifndef SHARDD_CLIENT_PYTHON_EXTENSION_NODES_H_
#define SHARDD_CLIENT_PYTHON_EXTENSION_NODES_H_

// Where autograd calls into units. Everything here belongs to the graph of one forward, which may outlive the unit and
// the attachment: it then raises.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>

#include "client/python/extension/unit.h"
#include "client/torch/torch_versions.h"

namespace shardd::python {

// The node that the inputs of one forward share; runs after the backward of all that uses them.
class PostBackwardInputs {
 public:
  PostBackwardInputs(std::weak_ptr<Unit> unit, uint64_t generation) : unit_(std::move(unit)), generation_(generation) {}
  // An alias of `input` behind the node. REQUIRES: input.requires_grad().
  at::Tensor Pass(const at::Tensor& input);

 private:
  const std::weak_ptr<Unit> unit_;
  const uint64_t generation_;
  NodePtr node_;
};

// Runs Unit::PreBackward before the backward of what made `output`. REQUIRES: output.requires_grad().
void HookOutput(const at::Tensor& output, std::weak_ptr<Unit> unit, uint64_t generation);

// Runs Unit::OnGradient in the place of torch's own accumulation into `.grad`.
NodePtr MakeAccumulator(std::weak_ptr<Unit> unit, size_t param);

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_EXTENSION_NODES_H_
