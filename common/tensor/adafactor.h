#ifndef SHARDD_COMMON_TENSOR_ADAFACTOR_H_
#define SHARDD_COMMON_TENSOR_ADAFACTOR_H_

// torch.optim.Adafactor of one whole parameter p with gradient g' = g * grad_scale, at its update number `step`:
//
//   w     = step ^ beta2_decay;  rho = min(lr, 1 / sqrt(step));  alpha = max(eps2, rms(p)) * rho
//   row   = lerp(row, mean of g' ^ 2 over columns, w);  col = lerp(col, mean of g' ^ 2 over rows, w)
//   v     = row * col / max(mean of row, eps1)            of each matrix that the last two dimensions are
//   v     = lerp(v, g' ^ 2, w)                            of a vector or scalar, whose v is state
//   u     = g' / sqrt(max(v, eps1 ^ 2))
//   p     = p * (1 - lr * weight_decay) - alpha / max(1, rms(u) / d) * u
//
// The numerics are decided here. Means and both rms are summed in double, in the order of elements, and rounded once.
// Everything else is fp32, in torch's order. So an update is torch's but for the order of sums, and states are fp32
// whatever p is.
//
// The work is a list of items, each some milliseconds, in this order:
//
//   rms(p) and sums of g' ^ 2, in blocks -> states, in blocks (logged) -> means of rows -> rms(u), in blocks -> p, in
//   blocks (logged)
//
// States are done before anything reads them, and p is changed when nothing but u and rms(p) is needed. u is made again
// from g and the states, and the log remembers rms(p), so another process can complete an update whose process was
// killed. Of the log, elements [0, AdafactorStateNumel) are the states', first row's and then col's, and p's follow.
// Items depend on the parameter alone, never on who works on what. What completes an update makes its sums again and
// goes on with what another process has written: whoever changes the items, the order of sums or that of the log raises
// kTakeUpFormats.

#include <cstdint>

#include "common/tensor/dtype.h"

namespace shardd {

class UpdateLog;

struct AdafactorParams {
  double lr = 0, beta2_decay = 0, eps2 = 0, d = 1, weight_decay = 0;
  double eps1 = -1;       // below 0: the machine epsilon of p's dtype
  int64_t step = 1;       // number of this update, from 1 on
  double grad_scale = 1;  // clip factor
};

// What a parameter is to Adafactor: matrices of its last two dimensions, or a vector.
struct AdafactorShape {
  bool is_factored = false;                  // it has two dimensions or more
  int64_t matrices = 1, rows = 1, cols = 1;  // not factored: one matrix of one row
  int64_t numel() const { return matrices * rows * cols; }
  // Elements of state 0, row (a vector's v), and of state 1, col.
  int64_t row_numel() const { return is_factored ? matrices * rows : numel(); }
  int64_t col_numel() const { return is_factored ? matrices * cols : 0; }
};

// All row-major and without gaps. p: `param_dtype` fp32, bf16 or fp16 (computed in fp32, rounded once); g, row, col:
// fp32. cast_dst: nullptr, or receives p in `cast_dtype`. workspace: AdafactorWorkspaceBytes, aligned to 64 bytes.
struct AdafactorTensor {
  AdafactorParams params;
  AdafactorShape shape;
  void* p = nullptr;
  DType param_dtype = v1::DTYPE_UNSPECIFIED;
  const float* g = nullptr;
  float* row = nullptr;
  float* col = nullptr;  // nullptr: it is not factored
  void* cast_dst = nullptr;
  DType cast_dtype = v1::DTYPE_UNSPECIFIED;
  float* workspace = nullptr;
};

// What one parameter at a time needs: 8 bytes for each row, each column and each matrix.
int64_t AdafactorWorkspaceBytes(const AdafactorShape& shape);
// What the update costs, in the multiplications of MuonCost, about. Whoever changes it raises kTakeUpFormats: see
// RanksOfWholeParams.
double AdafactorCost(const AdafactorShape& shape);
// The number of items; 0: the parameter has no elements.
int64_t AdafactorItems(const AdafactorShape& shape);
// Runs one item. Items are run once each, in their order. `log`: gets what is about to change, element 0 of the
// parameter's as its element `first`.
void RunAdafactorItem(const AdafactorTensor& tensor, int64_t item, UpdateLog* log = nullptr, int64_t first = 0);
// Runs what is left of an update of which the first `done` elements of the log are done. REQUIRES: where some of p's
// are, the log is that of the update.
void RunAdafactorFrom(const AdafactorTensor& tensor, int64_t done, UpdateLog* log, int64_t first);

}  // namespace shardd

#endif  // SHARDD_COMMON_TENSOR_ADAFACTOR_H_
