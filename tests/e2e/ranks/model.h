#ifndef SHARDD_TESTS_E2E_RANKS_MODEL_H_
#define SHARDD_TESTS_E2E_RANKS_MODEL_H_

// A small model written by hand, so that every gradient is known without a tensor library: four parameter groups
// (root, embed, mid, head), sizes that divide by nothing, a scalar, a frozen parameter and a tied one (head reads
// embed.weight transposed).
//
//   h0 = tanh(E x)     h1 = tanh(W1 h0 + b1) * frozen     h2 = W2 h1
//   h3 = E' h2         o = gain * (U h3) + bias           loss = mean of (o - t)^2

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "common/tensor/float_bits.h"

namespace shardd::e2e {

enum Param { kBias, kGain, kEmbed, kW1, kB1, kFrozen, kW2, kU, kParamCount };
enum GroupOf { kRoot, kEmbedGroup, kMid, kHead, kGroupCount };

inline constexpr const char* kParamNames[kParamCount] = {"bias",   "gain",       "embed.weight", "mid.w1",
                                                         "mid.b1", "mid.frozen", "mid.w2",       "head.u"};
inline constexpr const char* kGroupNames[kGroupCount] = {"(root)", "embed", "mid", "head"};
inline constexpr int kNumel[kParamCount] = {3, 1, 35, 91, 13, 13, 91, 15};
inline constexpr int kGroupOfParam[kParamCount] = {kRoot, kRoot, kEmbedGroup, kMid, kMid, kMid, kMid, kHead};
inline constexpr int kIn = 5, kHidden = 7, kWide = 13, kOut = 3, kRows = 4;

using Tensor = std::vector<float>;
using Values = std::array<Tensor, kParamCount>;

// The tree as the trainers describe it; proto3 JSON. `marked`: says itself which modules are fully sharded ones.
// `filler`: elements of one more parameter in mid, which nothing reads and no step changes: where groups are as large
// as that, they share gradient slots. `fields(module)`: more of its fields, each with a comma behind it; "" is the
// root.
template <typename Fields>
std::string TreeJson(bool marked, int64_t filler, Fields fields) {
  auto block = [&](const char* name) {
    return std::string(R"("className":"Block",)") + (marked ? R"("mark":"MODULE_MARK_FULLY_SHARD",)" : "") +
           fields(name);
  };
  auto param = [](const std::string& name, const std::string& shape, bool trains = true,
                  const std::string& storage = "0") {
    return R"({"name":")" + name + R"(","shape":[)" + shape + R"(],"dtype":"DTYPE_FLOAT32","requiresGrad":)" +
           (trains ? "true" : "false") + R"(,"storageId":)" + storage + "}";
  };
  return R"({"modules":[{"className":"Model","parent":-1,)" + fields("") + R"("parameters":[)" + param("bias", "3") +
         "," + param("gain", "") + R"(]},{"name":"embed",)" + block("embed") + R"("parameters":[)" +
         param("weight", "7,5", true, "1") + R"(]},{"name":"mid",)" + block("mid") + R"("parameters":[)" +
         param("w1", "13,7") + "," + param("b1", "13") + "," + param("frozen", "13", false) + "," +
         param("w2", "7,13") + (filler > 0 ? "," + param("filler", std::to_string(filler)) : "") +
         R"(]},{"name":"head",)" + block("head") + R"("parameters":[)" + param("tied", "7,5", true, "1") + "," +
         param("u", "3,5") + "]}]}";
}

inline Values InitialValues() {
  Values values;
  for (int p = 0; p < kParamCount; ++p) {
    values[p].resize(kNumel[p]);
    for (int i = 0; i < kNumel[p]; ++i) {
      values[p][i] = p == kGain ? 1.25f : 0.4f * std::sin(1.7f * static_cast<float>(p * 100 + i) + 0.3f);
    }
  }
  return values;
}

// A batch depends on nothing but its place, so that a replacement sees what its predecessor saw.
struct Batch {
  float x[kRows][kIn];
  float t[kRows][kOut];
};
inline Batch MakeBatch(int rank, int64_t step, int micro) {
  Batch batch;
  for (int r = 0; r < kRows; ++r) {
    const float seed = static_cast<float>(rank * 131 + step * 17 + micro * 53 + r * 5);
    for (int j = 0; j < kIn; ++j) {
      batch.x[r][j] = std::sin(seed + 3.1f * static_cast<float>(j));
    }
    for (int j = 0; j < kOut; ++j) {
      batch.t[r][j] = 0.8f * batch.x[r][j] - 0.5f * batch.x[r][j + 1] + 0.2f;
    }
  }
  return batch;
}

// Forward and backward in the stages of the groups: each stage takes the parameters of its group (head also the tied
// one), as a trainer has them while that group is unsharded.
class Pass {
 public:
  explicit Pass(const Batch& batch) : b_(batch) {}

  void ForwardEmbed(const Tensor& e) {
    Rows([&](int r) {
      for (int i = 0; i < kHidden; ++i) {
        float sum = 0;
        for (int k = 0; k < kIn; ++k) sum += e[i * kIn + k] * b_.x[r][k];
        h0_[r][i] = std::tanh(sum);
      }
    });
  }
  void ForwardMid(const Tensor& w1, const Tensor& b1, const Tensor& frozen, const Tensor& w2) {
    Rows([&](int r) {
      for (int i = 0; i < kWide; ++i) {
        float sum = b1[i];
        for (int k = 0; k < kHidden; ++k) sum += w1[i * kHidden + k] * h0_[r][k];
        t1_[r][i] = std::tanh(sum);
        h1_[r][i] = t1_[r][i] * frozen[i];
      }
      for (int i = 0; i < kHidden; ++i) {
        h2_[r][i] = 0;
        for (int k = 0; k < kWide; ++k) h2_[r][i] += w2[i * kWide + k] * h1_[r][k];
      }
    });
  }
  void ForwardHead(const Tensor& e, const Tensor& u) {
    Rows([&](int r) {
      for (int k = 0; k < kIn; ++k) {
        h3_[r][k] = 0;
        for (int i = 0; i < kHidden; ++i) h3_[r][k] += e[i * kIn + k] * h2_[r][i];
      }
      for (int j = 0; j < kOut; ++j) {
        z_[r][j] = 0;
        for (int k = 0; k < kIn; ++k) z_[r][j] += u[j * kIn + k] * h3_[r][k];
      }
    });
  }
  float Loss(const Tensor& bias, const Tensor& gain) {
    float loss = 0;
    Rows([&](int r) {
      for (int j = 0; j < kOut; ++j) {
        const float error = gain[0] * z_[r][j] + bias[j] - b_.t[r][j];
        loss += error * error / (kRows * kOut);
        do_[r][j] = 2 * error / (kRows * kOut);
      }
    });
    return loss;
  }

  // Gradients are written to `g`, which has its sizes and zeros.
  void BackwardRoot(const Tensor& gain, Values& g) {
    Rows([&](int r) {
      for (int j = 0; j < kOut; ++j) {
        g[kBias][j] += do_[r][j];
        g[kGain][0] += do_[r][j] * z_[r][j];
        dz_[r][j] = gain[0] * do_[r][j];
      }
    });
  }
  void BackwardHead(const Tensor& e, const Tensor& u, Values& g) {
    Rows([&](int r) {
      float dh3[kIn] = {};
      for (int j = 0; j < kOut; ++j) {
        for (int k = 0; k < kIn; ++k) {
          g[kU][j * kIn + k] += dz_[r][j] * h3_[r][k];
          dh3[k] += u[j * kIn + k] * dz_[r][j];
        }
      }
      for (int i = 0; i < kHidden; ++i) {
        dh2_[r][i] = 0;
        for (int k = 0; k < kIn; ++k) {
          g[kEmbed][i * kIn + k] += h2_[r][i] * dh3[k];
          dh2_[r][i] += e[i * kIn + k] * dh3[k];
        }
      }
    });
  }
  void BackwardMid(const Tensor& w1, const Tensor& frozen, const Tensor& w2, Values& g) {
    Rows([&](int r) {
      float da[kWide];
      for (int k = 0; k < kWide; ++k) {
        float dh1 = 0;
        for (int i = 0; i < kHidden; ++i) {
          g[kW2][i * kWide + k] += dh2_[r][i] * h1_[r][k];
          dh1 += w2[i * kWide + k] * dh2_[r][i];
        }
        da[k] = dh1 * frozen[k] * (1 - t1_[r][k] * t1_[r][k]);
        g[kB1][k] += da[k];
      }
      for (int k = 0; k < kHidden; ++k) {
        dh0_[r][k] = 0;
        for (int i = 0; i < kWide; ++i) {
          g[kW1][i * kHidden + k] += da[i] * h0_[r][k];
          dh0_[r][k] += w1[i * kHidden + k] * da[i];
        }
      }
    });
  }
  void BackwardEmbed(Values& g) {
    Rows([&](int r) {
      for (int i = 0; i < kHidden; ++i) {
        const float d = dh0_[r][i] * (1 - h0_[r][i] * h0_[r][i]);
        for (int k = 0; k < kIn; ++k) g[kEmbed][i * kIn + k] += d * b_.x[r][k];
      }
    });
  }

 private:
  template <typename Body>
  static void Rows(Body&& body) {
    for (int r = 0; r < kRows; ++r) body(r);
  }
  Batch b_;
  float h0_[kRows][kHidden], t1_[kRows][kWide], h1_[kRows][kWide], h2_[kRows][kHidden], h3_[kRows][kIn];
  float z_[kRows][kOut], do_[kRows][kOut], dz_[kRows][kOut], dh2_[kRows][kHidden], dh0_[kRows][kHidden];
};

inline Values Zeros() {
  Values values;
  for (int p = 0; p < kParamCount; ++p) {
    values[p].assign(kNumel[p], 0.0f);
  }
  return values;
}

// Elements of the dtypes that unshard gives, as the tests name them: "fp32", "bf16", "fp16".
inline float RoundTo(const std::string& dtype, float x) {
  if (dtype == "bf16") return tensor::Bf16ToFloat(tensor::FloatToBf16(x));
  if (dtype == "fp16") return tensor::HalfToFloat(tensor::FloatToHalf(x));
  return x;
}

// Patterns that trainer and reference share.
//
// absent "mixed": parameters that have no gradient on some ranks, and sometimes on none.
inline bool IsPresent(const std::string& absent, int rank, int64_t step, int param) {
  if (param == kFrozen) return false;
  if (absent == "mixed") {
    if ((step + param) % 5 == 0) return false;  // on no rank
    return (step + param * 3 + rank) % 3 != 0;  // on some
  }
  return true;
}
// fresh "b1": in the second backward of a step mid.b1's gradient replaces what was accumulated.
inline bool IsFresh(const std::string& fresh, int micro, int param) {
  return micro > 0 && ((fresh == "b1" && param == kB1) || (fresh == "gain" && param == kGain));
}
// "root,mid,...": indices of groups. Unknown names end the process.
inline std::vector<int> ParseOrder(const std::string& text) {
  std::vector<int> order;
  std::stringstream stream(text);
  for (std::string name; std::getline(stream, name, ',');) {
    int group = 0;
    while (group < kGroupCount && kGroupNames[group] != (name == "root" ? "(root)" : name)) ++group;
    if (group == kGroupCount) std::abort();
    order.push_back(group);
  }
  return order;
}
inline int OptimizerGroup(bool two, int param) { return two && (param == kB1 || param == kGain) ? 1 : 0; }

}  // namespace shardd::e2e

#endif  // SHARDD_TESTS_E2E_RANKS_MODEL_H_
