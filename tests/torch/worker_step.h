#ifndef SHARDD_TESTS_TORCH_WORKER_STEP_H_
#define SHARDD_TESTS_TORCH_WORKER_STEP_H_

// What the modes of a worker share.

#include <torch/optim/adamw.h>

#include <nlohmann/json.hpp>
#include <string>

#include "client/torch/adaptor.h"
#include "tests/torch/model.h"
#include "tests/torch/worker_options.h"

namespace shardd_test {

// Hyperparameters of optimizer group `group` at `step`.
shardd_hyperparameters Hyper(const WorkerOptions& options, int step, int group);
void SetHyper(const shardd_hyperparameters& hyper, torch::optim::AdamWOptions* target);
bool InSecondGroup(const WorkerOptions& options, const std::string& fqn);
shardd::ShardOptions MakeShardOptions(const WorkerOptions& options, const torch::nn::Module& model);
Position PositionOf(const WorkerOptions& options, int rank, int step, int micro);
// Forward and backward of every micro-batch of one step; the mean loss.
double RunStep(const WorkerOptions& options, int step, NetImpl& net, shardd::ShardedModule* sharded);

// Whole or not at all.
void WriteJson(const std::string& path, const nlohmann::json& json);
nlohmann::json ToJson(const at::Tensor& tensor);

// The modes.
void TrainReference(const WorkerOptions& options);
shardd::Status Probe(const WorkerOptions& options);
shardd::Status Refusals(const WorkerOptions& options);
shardd::Status FullParams(const WorkerOptions& options);
shardd::Status Edit(const WorkerOptions& options);

}  // namespace shardd_test

#endif  // SHARDD_TESTS_TORCH_WORKER_STEP_H_
