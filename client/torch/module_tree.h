#ifndef SHARDD_CLIENT_TORCH_MODULE_TREE_H_
#define SHARDD_CLIENT_TORCH_MODULE_TREE_H_

#include <torch/nn/module.h>

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "client/cpp/shardd.h"
#include "client/torch/options.h"

namespace shardd {

// The class of a module as policies name it: "gpt::BlockImpl" is "Block".
std::string ModuleClassName(const torch::nn::Module& module);

// As shardd.v1.DType's JSON names it; DTYPE_UNSPECIFIED, which the plan refuses, where there is no such thing.
std::string DTypeName(at::ScalarType dtype);

// shardd.v1.ModuleTree in proto3 JSON, in pre-order. What the options leave out is not described. Parameters that share
// memory are declared tied. Deterministic: equal modules and options give equal text in every process. Reads no
// parameter. INVALID_ARGUMENT naming the FQN: a mark that names nothing, is given twice or cuts through tied
// parameters; a parameter that is not a dense CPU tensor. FAILED_PRECONDITION: a parameter that a ShardedModule has
// already. REQUIRES: `root` is held by a shared_ptr (as torch::nn::Module::named_modules does).
Status ModuleTreeJson(const torch::nn::Module& root, const ShardOptions& options, nlohmann::json* tree);

}  // namespace shardd

#endif  // SHARDD_CLIENT_TORCH_MODULE_TREE_H_
