#ifndef SHARDD_COMMON_TENSOR_UPDATE_SCALARS_H_
#define SHARDD_COMMON_TENSOR_UPDATE_SCALARS_H_

// The scalars of an update: everything that does not depend on the element, computed in double and rounded once, as
// PyTorch passes scalars to its kernels. Every device updates with these, so results agree. Plain data; device code
// includes it.

namespace shardd {

struct AdamWParams;
struct SgdParams;
struct RuleParams;

struct AdamWScalars {
  float grad_scale;
  float coupled;  // weight_decay with coupled_decay, else 0
  float decay;    // 1 - lr * weight_decay, 1 with coupled_decay
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float step_size;                 // lr / (1 - beta1^step)
  float inverse_sqrt_correction2;  // 1 / sqrt(1 - beta2^step)
  float eps;
};
AdamWScalars MakeAdamWScalars(const AdamWParams& params);

struct SgdScalars {
  float grad_scale;
  float weight_decay;
  float momentum;
  float one_minus_dampening;
  float lr;
};
SgdScalars MakeSgdScalars(const SgdParams& params);

// Of every rule of UpdateRule; a rule reads those that its kernel names.
struct RuleScalars {
  float grad_scale;
  float weight_decay;  // added to the gradient, times the parameter
  float decay;         // 1 - lr * weight_decay, where it is decoupled
  float step_size;
  float eps;
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float momentum;
  float keep;                      // 0 in an update that finds `initial` instead of the first state, else 1
  float initial;                   // 0 where keep is 1
  float inverse_sqrt_correction2;  // as AdamWScalars, of kAmsgrad
};
RuleScalars MakeRuleScalars(const RuleParams& params);

}  // namespace shardd

#endif  // SHARDD_COMMON_TENSOR_UPDATE_SCALARS_H_
