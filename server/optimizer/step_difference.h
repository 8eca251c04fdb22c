#ifndef SHARDD_SERVER_OPTIMIZER_STEP_DIFFERENCE_H_
#define SHARDD_SERVER_OPTIMIZER_STEP_DIFFERENCE_H_

#include <string>

#include "shardd/v1/trainer.pb.h"

namespace shardd {

// The hyperparameters in which two steps differ, in words: `max_grad_norm (got 1, want 0)`; empty: none.
std::string StepDifference(const v1::Step& got, const v1::Step& want);

}  // namespace shardd

#endif  // SHARDD_SERVER_OPTIMIZER_STEP_DIFFERENCE_H_
