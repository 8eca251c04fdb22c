#ifndef SHARDD_CLIENT_TORCH_JOB_SPEC_H_
#define SHARDD_CLIENT_TORCH_JOB_SPEC_H_

#include <torch/nn/module.h>

#include <string>

#include "client/cpp/shardd.h"
#include "client/torch/options.h"

namespace shardd {

// shardd.v1.JobSpec in proto3 JSON: the module tree and the configuration. Errors and requirements are those of
// ModuleTreeJson.
Status JobSpecJson(const torch::nn::Module& root, const ShardOptions& options, std::string* json);

}  // namespace shardd

#endif  // SHARDD_CLIENT_TORCH_JOB_SPEC_H_
