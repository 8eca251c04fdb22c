#ifndef SHARDD_COMMON_PLAN_SUMMON_H_
#define SHARDD_COMMON_PLAN_SUMMON_H_

// Which parameters a request for full parameters gives.

#include <vector>

#include "common/plan/plan.h"

namespace shardd {

// By parameter: held by group `group` or, with `recurse`, by a group of a module beneath its module; tied ones also
// where one of their names lies there. group -1: the whole model. REQUIRES: -1 <= group < groups; `plan` is `spec`'s.
std::vector<bool> SummonedParams(const v1::JobSpec& spec, const ShardPlan& plan, int group, bool recurse);

}  // namespace shardd

#endif  // SHARDD_COMMON_PLAN_SUMMON_H_
