#ifndef SHARDD_COMMON_PLAN_SUMMON_H_
#define SHARDD_COMMON_PLAN_SUMMON_H_

// Selects the parameters that a request for full parameters covers.

#include <vector>

#include "common/plan/plan.h"

namespace shardd {

// By parameter: whether group `group` has it or, with `recurse`, a group of a module below. Tied parameters also count
// if one of their names is there. group -1: the whole model. REQUIRES: -1 <= group < groups; `plan` is `spec`'s.
std::vector<bool> SummonedParams(const v1::JobSpec& spec, const ShardPlan& plan, int group, bool recurse);

}  // namespace shardd

#endif  // SHARDD_COMMON_PLAN_SUMMON_H_
