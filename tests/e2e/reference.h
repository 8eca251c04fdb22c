#ifndef SHARDD_TESTS_E2E_REFERENCE_H_
#define SHARDD_TESTS_E2E_REFERENCE_H_

// The same training in one process without any service, from the definitions of PyTorch's AdamW and SGD. Every rank's
// batch is computed here; optimizer arithmetic is in double, so that it shares no rounding with what it checks.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "client/c/shardd.h"
#include "tests/e2e/ranks/args.h"
#include "tests/e2e/ranks/model.h"
#include "tests/e2e/ranks/precision.h"

namespace shardd::e2e {

struct Hyper {
  double lr, weight_decay, beta1, beta2, eps, momentum, dampening;
  bool nesterov;
};

inline Hyper HyperOf(const Args& args, int optimizer_group) {
  Hyper h;
  h.lr = args.Double("lr", args.Text("optimizer", "adamw") == "adamw" ? 0.01 : 0.1) * (optimizer_group == 1 ? 0.5 : 1);
  h.weight_decay = optimizer_group == 1 ? 0 : args.Double("weight_decay", 0.1);
  h.beta1 = 0.9;
  h.beta2 = 0.99;
  h.eps = 1e-8;
  h.momentum = args.Double("momentum");
  h.dampening = args.Double("dampening");
  h.nesterov = args.Int("nesterov") != 0;
  return h;
}

// As a step has them.
inline shardd_hyperparameters ValuesOf(const Hyper& h) {
  shardd_hyperparameters values = {};
  values.lr = h.lr, values.weight_decay = h.weight_decay, values.beta1 = h.beta1, values.beta2 = h.beta2;
  values.eps = h.eps, values.momentum = h.momentum, values.dampening = h.dampening,
  values.nesterov = h.nesterov ? 1 : 0;
  return values;
}
inline shardd_hyperparameters MuonValues(const Hyper& h) {
  shardd_hyperparameters values = {};
  values.lr = h.lr, values.weight_decay = 0.1, values.momentum = 0.95, values.nesterov = 1, values.eps = 1e-7;
  values.ns_a = 3.4445, values.ns_b = -4.775, values.ns_c = 2.0315, values.ns_steps = 5;
  return values;
}
inline shardd_hyperparameters AdafactorValues(const Hyper& h) {
  shardd_hyperparameters values = {};
  values.lr = h.lr, values.weight_decay = 0.1, values.beta2_decay = -0.8, values.eps = -1, values.eps2 = 1e-3;
  values.d = 1;
  return values;
}

struct Trained {
  std::vector<std::vector<double>> losses;  // by rank, by step: the mean of its micro-batches
  std::vector<double> norms;                // by step, before clipping
  Values values;
};

class Reference {
 public:
  // Rounds a parameter further, in the dtype in which ranks read it.
  using AsRead = std::function<void(int param, Tensor* values)>;
  // `as_read`: what ranks compute with and report.
  explicit Reference(const Args& args, AsRead as_read = nullptr)
      : args_(args), world_(args.Int("world", 2)), as_read_(std::move(as_read)), values_(InitialValues()) {
    for (int g = 0; g < kGroupCount; ++g) precision_[g] = PrecisionOf(args_, kGroupNames[g]);
    for (int p = 0; p < kParamCount; ++p) {
      for (auto* state : {&m_, &v_}) state->at(p).assign(kNumel[p], 0.0);
    }
  }

  Trained Run() {
    Trained result;
    result.losses.resize(world_);
    const int steps = args_.Int("steps", 50);
    for (int64_t step = 0; step < steps; ++step) {
      Values sum = Zeros();
      std::vector<bool> present(kParamCount, false);
      std::vector<double> losses(world_, 0.0);
      const int micros = args_.Int("micro", 1);
      for (int micro = 0; micro < micros; ++micro) {
        Values all = Zeros();
        std::vector<bool> here(kParamCount, false);
        for (int rank = 0; rank < world_; ++rank) {
          Values gradient = Zeros();
          losses[rank] += Gradient(rank, step, micro, gradient) / micros;
          AddPresent(rank, step, gradient, all, here);
        }
        const double factor = args_.Double("divide");
        const float scale = static_cast<float>(1.0 / (factor > 0 ? factor : world_));
        for (int p = 0; p < kParamCount; ++p) {
          if (!here[p]) continue;
          const bool replaces = IsFresh(args_.Text("fresh"), micro, p) || !present[p];
          for (int i = 0; i < kNumel[p]; ++i) {
            const float part = Reduced(p, all[p][i] * scale);
            sum[p][i] = replaces ? part : Kept(p, sum[p][i] + part);
          }
          present[p] = true;
        }
      }
      for (int rank = 0; rank < world_; ++rank) result.losses[rank].push_back(losses[rank]);
      result.norms.push_back(Update(sum, present));
    }
    result.values = values_;
    for (int p = 0; p < kParamCount && as_read_ != nullptr; ++p) Read(p, &result.values[p]);
    return result;
  }

 private:
  // What a reduction gives is a number of the dtype in which it is done: that of the gradients where none is said.
  float Reduced(int param, float x) const {
    const Precision& of = PrecisionOfParam(param);
    return RoundTo(of.reduce_dtype.empty() ? of.param_dtype : of.reduce_dtype, x);
  }
  // It is kept in that dtype where that is asked for, else in the parameter's, fp32.
  float Kept(int param, float x) const { return PrecisionOfParam(param).keep_low ? Reduced(param, x) : x; }
  const Precision& PrecisionOfParam(int param) const { return precision_[kGroupOfParam[param]]; }
  void Read(int param, Tensor* values) const {
    for (float& x : *values) x = RoundTo(PrecisionOfParam(param).param_dtype, x);
    if (as_read_ != nullptr) as_read_(param, values);
  }
  float Gradient(int rank, int64_t step, int micro, Values& g) const {
    Values v = values_;
    for (int p = 0; p < kParamCount; ++p) Read(p, &v[p]);
    Pass pass(MakeBatch(rank, step, micro));
    pass.ForwardEmbed(v[kEmbed]);
    pass.ForwardMid(v[kW1], v[kB1], v[kFrozen], v[kW2]);
    pass.ForwardHead(v[kEmbed], v[kU]);
    const float loss = pass.Loss(v[kBias], v[kGain]);
    pass.BackwardRoot(v[kGain], g);
    pass.BackwardHead(v[kEmbed], v[kU], g);
    pass.BackwardMid(v[kW1], v[kFrozen], v[kW2], g);
    pass.BackwardEmbed(g);
    return loss;
  }

  void AddPresent(int rank, int64_t step, const Values& gradient, Values& all, std::vector<bool>& here) const {
    for (int p = 0; p < kParamCount; ++p) {
      if (!IsPresent(args_.Text("absent"), rank, step, p)) continue;
      here[p] = true;
      const Precision& of = PrecisionOfParam(p);
      for (int i = 0; i < kNumel[p]; ++i) {
        all[p][i] += RoundTo(of.reduce_dtype, RoundTo(of.param_dtype, gradient[p][i]));
      }
    }
  }

  double Update(const Values& gradient, const std::vector<bool>& present) {
    const double max_norm = args_.Double("max_norm");
    double norm = 0;
    double clip = 1;
    if (max_norm > 0) {
      const std::string order = args_.Text("norm_type", "2");
      for (int p = 0; p < kParamCount; ++p) {
        for (int i = 0; present[p] && i < kNumel[p]; ++i) {
          const double x = std::abs(double{gradient[p][i]});
          norm = order == "inf" ? std::max(norm, x) : norm + std::pow(x, std::stod(order));
        }
      }
      norm = order == "inf" ? norm : std::pow(norm, 1 / std::stod(order));
      clip = std::min(1.0, max_norm / (norm + 1e-6));
    }
    for (int p = 0; p < kParamCount; ++p) {
      if (!present[p]) continue;
      const Hyper h = HyperOf(args_, OptimizerGroup(args_.Int("two_groups") != 0, p));
      ++steps_[p];
      for (int i = 0; i < kNumel[p]; ++i) {
        values_[p][i] =
            static_cast<float>(args_.Text("optimizer", "adamw") == "adamw" ? AdamW(h, p, i, clip * gradient[p][i])
                                                                           : Sgd(h, p, i, clip * gradient[p][i]));
      }
    }
    return norm;
  }
  double AdamW(const Hyper& h, int p, int i, double g) {
    const double value = double{values_[p][i]} * (1 - h.lr * h.weight_decay);
    m_[p][i] = h.beta1 * m_[p][i] + (1 - h.beta1) * g;
    v_[p][i] = h.beta2 * v_[p][i] + (1 - h.beta2) * g * g;
    const double m = m_[p][i] / (1 - std::pow(h.beta1, steps_[p]));
    const double v = v_[p][i] / (1 - std::pow(h.beta2, steps_[p]));
    return value - h.lr * m / (std::sqrt(v) + h.eps);
  }
  double Sgd(const Hyper& h, int p, int i, double g) {
    g += h.weight_decay * values_[p][i];
    if (h.momentum > 0) {
      m_[p][i] = steps_[p] == 1 ? g : h.momentum * m_[p][i] + (1 - h.dampening) * g;
      g = h.nesterov ? g + h.momentum * m_[p][i] : m_[p][i];
    }
    return values_[p][i] - h.lr * g;
  }

  const Args args_;
  const int world_;
  const AsRead as_read_;
  Precision precision_[kGroupCount];
  Values values_;
  std::array<std::vector<double>, kParamCount> m_, v_;
  int64_t steps_[kParamCount] = {};
};

}  // namespace shardd::e2e

#endif  // SHARDD_TESTS_E2E_REFERENCE_H_
