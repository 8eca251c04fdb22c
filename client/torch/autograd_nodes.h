#ifndef SHARDD_CLIENT_TORCH_AUTOGRAD_NODES_H_
#define SHARDD_CLIENT_TORCH_AUTOGRAD_NODES_H_

// Where the autograd engine calls into ShardedState.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "client/torch/sharded_state.h"
#include "client/torch/torch_versions.h"

namespace shardd::internal {

// Replaces each input that requires a gradient by an alias whose node calls EndBackward(use). The node is older than
// every operation of the module, so the engine runs it after all of them, gradient accumulators included.
void PassInputs(const std::shared_ptr<Use>& use, const std::vector<at::Tensor*>& inputs);

// BeginBackward(use) will be called before the first operation of the module's backward. False: no output requires a
// gradient, there is no backward.
bool HookOutputs(const std::shared_ptr<Use>& use, const std::vector<at::Tensor>& outputs);

// Gradients of the leaf `tensor` go to OnGradient(param) instead of into its .grad: one copy, no allocation, nothing
// zeroed. The caller keeps the node; torch holds it weakly.
NodePtr InstallGradientAccumulator(const std::shared_ptr<ShardedState>& state, int32_t param, const at::Tensor& tensor);

}  // namespace shardd::internal

#endif  // SHARDD_CLIENT_TORCH_AUTOGRAD_NODES_H_
