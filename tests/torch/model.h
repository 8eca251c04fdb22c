#ifndef SHARDD_TESTS_TORCH_MODEL_H_
#define SHARDD_TESTS_TORCH_MODEL_H_

#include <torch/nn/module.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "client/torch/adaptor.h"
#include "tests/torch/worker_options.h"

namespace shardd_test {

// Where a batch comes from and which parts of the model it uses.
struct Position {
  int rank = 0;
  int step = 0;
  int micro = 0;
};

// x weight^T + bias. The weight may be another one's: tied.
struct AffineImpl : torch::nn::Module {
  AffineImpl(int64_t in, int64_t out, at::Tensor shared = {});
  at::Tensor forward(at::Tensor x);
  at::Tensor weight, bias;
};

// A residual cell of uneven sizes; a fully sharded module.
struct CellImpl : torch::nn::Module {
  CellImpl(int64_t width, int64_t hidden, at::Tensor shared);
  at::Tensor forward(at::Tensor x, bool with_extra);
  std::shared_ptr<AffineImpl> a, gate, b, extra;
};

// An embedding; a fully sharded module whose input needs no gradient.
struct TableImpl : torch::nn::Module {
  TableImpl(int64_t rows, int64_t width);
  at::Tensor forward(at::Tensor index);
  at::Tensor weight;
};

struct NetImpl : torch::nn::Module {
  explicit NetImpl(const std::string& kind);
  // The loss.
  at::Tensor forward(at::Tensor x, at::Tensor index, at::Tensor target, Position at);

  const std::string kind;
  std::shared_ptr<AffineImpl> in, out, unused;
  std::vector<std::shared_ptr<CellImpl>> cells;
  std::vector<std::shared_ptr<TableImpl>> tables;
  shardd::ShardedModule* sharded = nullptr;
  bool recompute = false;  // cells keep no activations, and run again in backward
  // Parts that belong to another one.
  std::map<const torch::nn::Module*, shardd::ShardedModule*> others;

 private:
  template <typename M, typename... Args>
  at::Tensor Call(M& module, Args... args) {
    const auto other = others.find(&module);
    shardd::ShardedModule* owner = other != others.end() ? other->second : sharded;
    return owner != nullptr ? owner->Run(module, args...) : module.forward(args...);
  }
  at::Tensor CallCell(CellImpl& cell, at::Tensor x, bool with_extra);
};

// `loss` plus `weight` times the square of its gradient in `x`, which requires one. Weight 0: `loss`.
at::Tensor Penalised(const at::Tensor& loss, const at::Tensor& x, double weight);

struct Batch {
  at::Tensor x, index, target;
};
Batch MakeBatch(const Position& at, at::ScalarType dtype);

}  // namespace shardd_test

#endif  // SHARDD_TESTS_TORCH_MODEL_H_
