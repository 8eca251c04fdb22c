#ifndef SHARDD_COMMON_TENSOR_KERNELS_H_
#define SHARDD_COMMON_TENSOR_KERNELS_H_

// CPU kernels over contiguous host memory. This header decides the numerics:
// - Casts round to nearest, ties to even; NaN stays NaN; denormals are kept (software rounding: the hardware
//   instruction flushes them, measured). fp16 overflows to infinity.
// - Reduction rounds each source to `reduce_dtype` (as it would travel), widens it to fp32 and adds in the order of
//   `sources` in fp32. It multiplies the sum once by `scale` and rounds it once to `reduce_dtype`, because the result
//   of a reduction in that dtype is a number of that dtype. PyTorch rounds after each addition, and again after the
//   division: for two sources and a scale of a power of two the bits are the same; for more, this is nearer to the sum.
//   No FMA contraction (-ffp-contract=off), so that every machine and every shard boundary gives the same bits.
// All functions are thread-safe. Ranges must not overlap unless stated. Pointers need only the alignment of their
// dtype.

#include <cstdint>

#include "absl/types/span.h"
#include "common/tensor/dtype.h"
#include "common/tensor/update_scalars.h"

namespace shardd {

class UpdateLog;

// dst[i] = cast(src[i]) for i in [0, numel). Any pair of floating dtypes; equal dtypes copy. Writes large ranges with
// non-temporal stores.
void Cast(const void* src, DType from, void* dst, DType to, int64_t numel);

// Copies bytes; large ranges with non-temporal stores.
void CopyBytes(const void* src, void* dst, int64_t size_bytes);

// r = keep(reduce(scale * (sum over k, in order, of reduce(sources[k][i])))),
// dst[i] = accumulate ? keep(dst[i] + r) : r.
// sources: at least one, in `source_dtype` fp32, bf16, fp16, or fp64 (added four at a time in fp64). reduce_dtype:
// DTYPE_UNSPECIFIED means that of the sources, and fp32 for fp64.
// keep: dtype of the gradient tensor, whatever dst can hold; DTYPE_UNSPECIFIED means fp32.
void ReduceSources(absl::Span<const void* const> sources, DType source_dtype, DType reduce_dtype, DType keep,
                   float scale, bool accumulate, float* dst, int64_t numel);

// Sum of squares in double, over fixed blocks of 4096 elements so that the result does not depend on threads.
// A non-finite element makes the result non-finite.
double SquaredNorm(const float* src, int64_t numel);

// PyTorch's AdamW (torch.optim.AdamW, decoupled weight decay), per element, in fp32:
//   g' = g * grad_scale; p *= 1 - lr*weight_decay; m += (1-beta1)*(g'-m); v = beta2*v + (1-beta2)*g'*g';
//   p -= lr/bias_correction1 * m / (sqrt(v)/sqrt(bias_correction2) + eps);   bias_correctionN = 1 - betaN^step
struct AdamWParams {
  double lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;
  int64_t step = 0;       // number of this update for these parameters, from 1
  double grad_scale = 1;  // clip factor
  // torch.optim.Adam: p is not shrunk; instead the gradient gets weight_decay * p added: g' = g*grad_scale +
  // weight_decay*p.
  bool coupled_decay = false;
};
// p: `param_dtype` fp32, bf16 or fp16 (computed in fp32, rounded once); g, m, v: fp32.
// cast_dst: nullptr, or receives p in `cast_dtype` (the copy that the next forward reads).
void AdamWUpdate(const AdamWParams& params, void* p, DType param_dtype, const float* g, float* m, float* v,
                 void* cast_dst, DType cast_dtype, int64_t numel);

// The same, from the scalars that every device uses (update_scalars.h). `log`: gets what is about to change, element 0
// as its element `first` (update_log.h); the cast copy may be behind what the log says is done.
void AdamWUpdateWith(const AdamWScalars& scalars, void* p, DType param_dtype, const float* g, float* m, float* v,
                     void* cast_dst, DType cast_dtype, int64_t numel, UpdateLog* log = nullptr, int64_t first = 0);

// PyTorch's SGD (torch.optim.SGD): g' = g*grad_scale + weight_decay*p; first step: buf = g', later
// buf = momentum*buf + (1-dampening)*g'; g' = nesterov ? g' + momentum*buf : buf; p -= lr*g'.
struct SgdParams {
  double lr = 0, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false;
  bool first_step = false;  // the momentum buffer has no value yet
  double grad_scale = 1;
};
// buf: fp32, nullptr iff momentum == 0.
void SgdUpdate(const SgdParams& params, void* p, DType param_dtype, const float* g, float* buf, void* cast_dst,
               DType cast_dtype, int64_t numel);
void SgdUpdateWith(const SgdScalars& scalars, bool nesterov, bool first_step, void* p, DType param_dtype,
                   const float* g, float* buf, void* cast_dst, DType cast_dtype, int64_t numel,
                   UpdateLog* log = nullptr, int64_t first = 0);

// Updates of the other kinds, with states a, b, c per element, in fp32; g' = g*grad_scale. An optimizer is
// added here by a value, a body in update_rules.cc and a row in common/plan/optimizer_kinds.cc.
enum class UpdateRule {
  // torch.optim.Adagrad: g' += weight_decay*p; a += g'*g'; p -= lr/(1 + (step-1)*lr_decay) * g' / (sqrt(a) + eps). The
  // first update finds `initial` in a.
  kAdagrad,
  // torch.optim.RMSprop: g' += weight_decay*p; a = beta2*a + (1-beta2)*g'*g'; p -= lr * g' / (sqrt(a) + eps).
  kRmsprop,
  // With momentum: b = momentum*b + g' / (sqrt(a) + eps); p -= lr*b.
  kRmspropMomentum,
  // centered=True: b += (1-beta2)*(g'-b), and a - b*b instead of a under the root; 0 where rounding makes it negative.
  kRmspropCentered,
  // Lion: p *= 1 - lr*weight_decay; p -= lr * sign(beta1*a + (1-beta1)*g'); a = beta2*a + (1-beta2)*g'. sign(0) is 0.
  kLion,
  // Three states, on CPUs alone. centered=True with momentum: as kRmspropCentered, and c is the momentum buffer.
  kRmspropCenteredMomentum,
  // amsgrad=True of torch.optim.Adam and, without `coupled_decay`, AdamW: as AdamWUpdate with a and b as its states,
  // and
  // c = max(c, b) in the place of b under the root.
  kAmsgrad,
};
inline constexpr int kUpdateRules = 5;  // with one or two states: those before kRmspropCenteredMomentum
inline constexpr int kAllUpdateRules = 7;
const char* UpdateRuleName(UpdateRule rule);
int UpdateRuleStates(UpdateRule rule);  // 1, 2 or 3

struct RuleParams {
  UpdateRule rule = UpdateRule::kAdagrad;
  double lr = 0, weight_decay = 0, eps = 0, beta1 = 0, beta2 = 0, momentum = 0, lr_decay = 0, initial = 0;
  int64_t step = 1;            // number of this update for these parameters, from 1
  double grad_scale = 1;       // clip factor
  bool coupled_decay = false;  // kAmsgrad: of Adam
};
// The rest as with AdamWUpdateWith. b: nullptr iff the rule has one state; c: nullptr iff it has less than three.
void RuleUpdateWith(UpdateRule rule, const RuleScalars& scalars, void* p, DType param_dtype, const float* g, float* a,
                    float* b, void* cast_dst, DType cast_dtype, int64_t numel, UpdateLog* log = nullptr,
                    int64_t first = 0, float* c = nullptr);

}  // namespace shardd

#endif  // SHARDD_COMMON_TENSOR_KERNELS_H_
