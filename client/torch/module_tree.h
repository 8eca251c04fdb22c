#ifndef SHARDD_CLIENT_TORCH_MODULE_TREE_H_
#define SHARDD_CLIENT_TORCH_MODULE_TREE_H_

#include <torch/nn/module.h>

#include <string>

#include "client/torch/options.h"

namespace shardd {

// The class of a module as policies name it: "gpt::BlockImpl" is "Block".
std::string ModuleClassName(const torch::nn::Module& module);

// shardd.v1.JobSpec in proto3 JSON: the module tree in pre-order and the configuration. Parameters that share memory
// are declared tied. Deterministic: equal modules and options give equal text in every process. REQUIRES: `root` is
// held by a shared_ptr (as torch::nn::Module::named_modules does).
std::string JobSpecJson(const torch::nn::Module& root, const ShardOptions& options);

}  // namespace shardd

#endif  // SHARDD_CLIENT_TORCH_MODULE_TREE_H_
