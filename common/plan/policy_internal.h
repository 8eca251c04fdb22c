#ifndef SHARDD_COMMON_PLAN_POLICY_INTERNAL_H_
#define SHARDD_COMMON_PLAN_POLICY_INTERNAL_H_

// Second stage of PlanShards: which modules are fully sharded modules.

#include <vector>

#include "absl/status/statusor.h"
#include "common/plan/tree_internal.h"
#include "shardd/v1/model.pb.h"

namespace shardd::plan_internal {

// By module. The root is always true; modules that are left out never are.
// Containers without a forward of their own (ModuleList, ModuleDict, ParameterList, ParameterDict) cannot own an
// unshard, so "always" and "minimum numel" pass over them; a mark, a class name or an FQN that names one is obeyed.
// INVALID_ARGUMENT: unknown FQN (named), negative minimum.
absl::StatusOr<std::vector<bool>> FindFullyShardedModules(const v1::ModuleTree& tree, const ManagedTree& managed,
                                                          const v1::Policy& policy);

}  // namespace shardd::plan_internal

#endif  // SHARDD_COMMON_PLAN_POLICY_INTERNAL_H_
