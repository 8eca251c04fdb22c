#ifndef SHARDD_COMMON_TENSOR_MUON_H_
#define SHARDD_COMMON_TENSOR_MUON_H_

// torch.optim.Muon of one whole matrix p of `rows` x `cols`, with momentum buffer buf and gradient g' = g * grad_scale:
//
//   buf = lerp(buf, g', 1 - momentum)
//   X   = bf16(nesterov ? lerp(g', buf, momentum) : buf), transposed where rows > cols
//   X   = bf16(X / max(bf16(|X|), bf16(eps)))
//   ns_steps times:  G = bf16(X X^T);  H = bf16(b G + c G G);  X = bf16(a X + H X)
//   p   = p * (1 - lr * weight_decay) - lr * adjusted * X, transposed back
//
// The numerics are decided here. Matrices between the products are numbers of bf16, as torch has them; they are stored
// as floats, products are summed in fp32, and what a line above makes of a sum is rounded once. So an update is torch's
// but for the order of sums, whose last bits a rounding to bf16 may turn into one of its own. lerp, the decay and the
// update itself are fp32, in torch's order.
//
// The work is a list of items, each some tens of milliseconds at most, in this order:
//
//   momentum, in blocks (logged) -> X, in blocks -> |X| -> X / |X|, in blocks -> products, in tiles -> X as p lies, in
//   blocks -> p, in blocks (logged)
//
// buf is done before anything reads it, and p is changed when nothing of it is read any more: an update whose process
// was killed is completed by making X again from g and buf (server/device/ops/rest_of_update.h). Of the log, elements
// [0, numel) are buf's and [numel, 2 * numel) are p's. Items depend on the matrix alone, never on who works on what.

#include <cstdint>

#include "common/tensor/dtype.h"

namespace shardd {

class UpdateLog;

struct MuonParams {
  double lr = 0, weight_decay = 0, momentum = 0, eps = 0;
  bool nesterov = false;
  double a = 0, b = 0, c = 0;  // ns_coefficients
  int ns_steps = 0;            // 0 to kMaxNewtonSchulzSteps
  // What lr is multiplied by: sqrt(max(1, rows / cols)), or 0.2 * sqrt(max(rows, cols)).
  bool match_rms_adamw = false;
  double grad_scale = 1;  // clip factor
};
inline constexpr int kMaxNewtonSchulzSteps = 99;  // as torch

// All row-major and without gaps. p: `param_dtype` fp32, bf16 or fp16 (computed in fp32, rounded once); g, buf: fp32.
// cast_dst: nullptr, or receives p in `cast_dtype`. workspace: MuonWorkspaceBytes, aligned to 64 bytes.
struct MuonMatrix {
  MuonParams params;
  int64_t rows = 0, cols = 0;
  void* p = nullptr;
  DType param_dtype = v1::DTYPE_UNSPECIFIED;
  const float* g = nullptr;
  float* buf = nullptr;
  void* cast_dst = nullptr;
  DType cast_dtype = v1::DTYPE_UNSPECIFIED;
  float* workspace = nullptr;
};

// What one matrix at a time needs: about 8 bytes for each element, and 16 where it is square.
int64_t MuonWorkspaceBytes(int64_t rows, int64_t cols);
// Multiplications of the update, about: what it costs. Whoever changes it raises kTakeUpFormats: see
// RanksOfWholeParams.
double MuonCost(int64_t rows, int64_t cols, int ns_steps);

// The number of items; 0: the matrix has no elements.
int64_t MuonItems(int64_t rows, int64_t cols, int ns_steps);
// Runs one item. Items are run once each, in their order. `log`: gets what is about to change, element 0 of the
// matrix's as its element `first`.
void RunMuonItem(const MuonMatrix& matrix, int64_t item, UpdateLog* log = nullptr, int64_t first = 0);
// Runs what is left of an update of which the first `done` elements of the log, 0 to 2 * numel, are done.
void RunMuonFrom(const MuonMatrix& matrix, int64_t done, UpdateLog* log, int64_t first);

}  // namespace shardd

#endif  // SHARDD_COMMON_TENSOR_MUON_H_
