#ifndef SHARDD_TESTS_COMMON_PLAN_ODD_PARAMS_H_
#define SHARDD_TESTS_COMMON_PLAN_ODD_PARAMS_H_

#include "tests/common/plan/spec_builder.h"

namespace shardd {

// root(scale) { a(weight, bias, norm, gain, table) } with odd sizes, so that there are alignment gaps, and shards are
// uneven or, of few elements, empty; "a.table" is frozen.
inline void AddOddParams(SpecBuilder* builder) {
  builder->Param(0, "scale", {1});
  const int a = builder->AddSharded(0, "a");
  builder->Param(a, "weight", {7, 15});
  builder->Param(a, "bias", {7});
  builder->Param(a, "norm", {64});
  builder->Param(a, "gain", {3, 2});
  builder->Param(a, "table", {5, 3}, {.requires_grad = false});
}

}  // namespace shardd

#endif  // SHARDD_TESTS_COMMON_PLAN_ODD_PARAMS_H_
