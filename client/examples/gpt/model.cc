#include "client/examples/gpt/model.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

#include "client/examples/gpt/data.h"

namespace gpt {

using torch::nn::Embedding;
using torch::nn::LayerNorm;
using torch::nn::LayerNormOptions;
using torch::nn::Linear;
using torch::nn::LinearOptions;

BlockImpl::BlockImpl(int64_t width, int64_t head_count) : heads(head_count) {
  ln1 = register_module("ln1", LayerNorm(LayerNormOptions({width})));
  ln2 = register_module("ln2", LayerNorm(LayerNormOptions({width})));
  qkv = register_module("qkv", Linear(width, 3 * width));
  proj = register_module("proj", Linear(width, width));
  up = register_module("up", Linear(width, 4 * width));
  down = register_module("down", Linear(4 * width, width));
}

at::Tensor BlockImpl::forward(at::Tensor x) {
  const int64_t batch = x.size(0);
  const int64_t length = x.size(1);
  const int64_t width = x.size(2);
  const std::vector<at::Tensor> parts =
      qkv(ln1(x)).view({batch, length, 3, heads, width / heads}).permute({2, 0, 3, 1, 4}).unbind(0);
  at::Tensor attended =
      at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, /*dropout_p=*/0.0, /*is_causal=*/true);
  x = x + proj(attended.transpose(1, 2).reshape({batch, length, width}));
  return x + down(at::gelu(up(ln2(x))));
}

GptImpl::GptImpl(int64_t vocabulary, int64_t layers, int64_t width, int64_t heads, int64_t context) {
  tok = register_module("tok", Embedding(vocabulary, width));
  pos = register_module("pos", Embedding(context, width));
  blocks = register_module("blocks", torch::nn::ModuleList());
  for (int64_t i = 0; i < layers; ++i) {
    blocks->push_back(Block(width, heads));
  }
  ln = register_module("ln", LayerNorm(LayerNormOptions({width})));
  head = register_module("head", Linear(LinearOptions(width, vocabulary).bias(false)));
}

void GptImpl::Initialize(uint64_t seed) {
  const at::NoGradGuard no_grad;
  Random random(seed);
  for (at::Tensor& parameter : parameters()) {
    if (parameter.dim() < 2) {
      // Norms start at one, biases at zero: nothing here depends on torch's generator.
      continue;
    }
    float* data = parameter.data_ptr<float>();
    for (int64_t i = 0; i < parameter.numel(); ++i) {
      const double radius = std::sqrt(-2 * std::log(1 - random.NextUniform()));
      data[i] = static_cast<float>(0.02 * radius * std::cos(2 * std::numbers::pi * random.NextUniform()));
    }
  }
  for (const auto& entry : named_parameters()) {
    if (entry.key().ends_with("bias")) {
      entry.value().data().zero_();
    }
  }
}

at::Tensor GptImpl::forward(at::Tensor idx, at::Tensor target) {
  at::Tensor x = tok(idx) + pos(at::arange(idx.size(1)));
  for (const auto& module : *blocks) {
    BlockImpl& block = *module->as<BlockImpl>();
    x = sharded != nullptr ? sharded->Run(block, x) : block.forward(x);
  }
  at::Tensor logits = head(ln(x));
  if (!target.defined()) {
    return logits;
  }
  return at::cross_entropy_loss(logits.view({-1, logits.size(-1)}).to(at::kFloat), target.reshape({-1}));
}

std::string Generate(GptImpl& model, const std::string& prompt, int64_t count, int64_t context, uint64_t seed) {
  constexpr double kTemperature = 0.7;
  const at::NoGradGuard no_grad;
  Random random(seed);
  std::string text = prompt;
  for (int64_t i = 0; i < count; ++i) {
    const size_t length = std::min(text.size(), static_cast<size_t>(context));
    std::vector<int64_t> window(text.end() - static_cast<int64_t>(length), text.end());
    const at::Tensor idx = at::from_blob(window.data(), {1, static_cast<int64_t>(length)}, at::kLong).clone();
    const at::Tensor logits =
        model.sharded != nullptr ? model.sharded->Run(model, idx, at::Tensor()) : model.forward(idx, at::Tensor());
    const at::Tensor odds = (logits[0][-1].to(at::kDouble) / kTemperature).softmax(0).contiguous();
    double left = random.NextUniform();
    int64_t next = 0;
    for (; next + 1 < odds.numel() && (left -= odds.const_data_ptr<double>()[next]) > 0; ++next) {
    }
    text.push_back(static_cast<char>(next));
  }
  return text.substr(prompt.size());
}

}  // namespace gpt
