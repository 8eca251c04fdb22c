#ifndef SHARDD_CLIENT_EXAMPLES_GPT_MODEL_H_
#define SHARDD_CLIENT_EXAMPLES_GPT_MODEL_H_

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cstdint>
#include <string>

#include "client/torch/adaptor.h"

namespace gpt {

// Pre-norm transformer block: causal attention and a four times wider GELU MLP, both residual.
struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t width, int64_t head_count);
  at::Tensor forward(at::Tensor x);

  const int64_t heads;
  torch::nn::LayerNorm ln1{nullptr}, ln2{nullptr};
  torch::nn::Linear qkv{nullptr}, proj{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

// A GPT-style character model with learned positions and an untied head.
struct GptImpl : torch::nn::Module {
  GptImpl(int64_t vocabulary, int64_t layers, int64_t width, int64_t heads, int64_t context);
  // Linear and embedding weights from a normal distribution of deviation 0.02; the same for every `seed` and machine.
  void Initialize(uint64_t seed);
  // idx: int64 [batch, length]. The mean cross entropy of `target` (same shape), or, where target is undefined, the
  // logits [batch, length, vocabulary].
  at::Tensor forward(at::Tensor idx, at::Tensor target);

  torch::nn::Embedding tok{nullptr}, pos{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm ln{nullptr};
  torch::nn::Linear head{nullptr};
  // Where the model is sharded, its blocks are run by it. Not owned.
  shardd::ShardedModule* sharded = nullptr;
};
TORCH_MODULE(Gpt);

// `count` characters after `prompt`, without gradients. Every rank may do so on its own.
std::string Generate(GptImpl& model, const std::string& prompt, int64_t count, int64_t context, uint64_t seed);

}  // namespace gpt

#endif  // SHARDD_CLIENT_EXAMPLES_GPT_MODEL_H_
