#ifndef SHARDD_COMMON_PLAN_OPTIMIZER_KINDS_H_
#define SHARDD_COMMON_PLAN_OPTIMIZER_KINDS_H_

// The one table of optimizer kinds: what state a kind has, which hyperparameters it takes, and their legal ranges. The
// daemon and the library read it, so a kind that is no row of it is refused by its name or number wherever it appears.

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "shardd/v1/model.pb.h"
#include "shardd/v1/trainer.pb.h"

namespace shardd {

// A hyperparameter, which is finite and at least 0.
struct HyperParameterRange {
  const char* name;
  double (v1::HyperParameters::*get)() const;
  bool below_one;  // [0, 1)
};

struct OptimizerKindRow {
  v1::OptimizerKind kind;
  bool in_daemon;                   // a step brings hyperparameters and updates parameters
  std::vector<const char*> states;  // torch's names of the fp32 tensors that each parameter has
  const char* momentum_state;       // one more with OptimizerConfig.momentum; null: the kind has no momentum
  bool counts_steps;                // torch's state has "step"
  std::vector<HyperParameterRange> hyperparameters;
};

// All kinds but UNSPECIFIED. Immutable.
const std::vector<OptimizerKindRow>& OptimizerKinds();

// Null: no such kind.
const OptimizerKindRow* FindOptimizerKind(v1::OptimizerKind kind);

// "OPTIMIZER_KIND_SGD", or the number of a kind that this build does not know.
std::string OptimizerKindText(v1::OptimizerKind kind);

// How many groups of hyperparameters a step brings: the config's and the default one; 0: no parameter changes by it.
int OptimizerGroups(const v1::OptimizerConfig& optimizer);

// Whether groups have kinds of their own (OptimizerConfig.Group.kind). Group 0, what is in no other, then has no
// optimizer: no step changes it.
bool HasSeveralOptimizers(const v1::OptimizerConfig& optimizer);

// What steps an optimizer group. REQUIRES: 0 <= group <= groups_size.
v1::OptimizerKind OptimizerKindOf(const v1::OptimizerConfig& optimizer, int group);
bool HasMomentum(const v1::OptimizerConfig& optimizer, int group);

// Number of fp32 tensors that each parameter of an optimizer group has; of TRAINER, those of all.
int OptimizerStatesOf(const v1::OptimizerConfig& optimizer, int group);

// INVALID_ARGUMENT: PyTorch's optimizer would refuse a value (negative lr, beta outside [0, 1), nesterov without
// momentum), or there is momentum without a planned buffer; "optimizer group 1: beta1 is out of range (got 2, want
// [0, 1))". Group 0 beside several optimizers has no values that count.
absl::Status CheckHyperParameters(const v1::OptimizerConfig& optimizer, int group, const v1::HyperParameters& values);

}  // namespace shardd

#endif  // SHARDD_COMMON_PLAN_OPTIMIZER_KINDS_H_
