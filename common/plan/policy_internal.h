#ifndef SHARDD_COMMON_PLAN_POLICY_INTERNAL_H_
#define SHARDD_COMMON_PLAN_POLICY_INTERNAL_H_

// Second stage of PlanShards: chooses the fully sharded modules.

#include <vector>

#include "absl/status/statusor.h"
#include "common/plan/tree_internal.h"
#include "shardd/v1/model.pb.h"

namespace shardd::plan_internal {

// By module: whether it is a fully sharded module. True for the root, false for modules that are left out. Containers
// without a forward (ModuleList, ModuleDict, ParameterList, ParameterDict) cannot own an unshard, so "always" and
// "minimum numel" skip them; a mark, a class name or an FQN that names one applies. INVALID_ARGUMENT: unknown FQN
// (named), negative minimum.
absl::StatusOr<std::vector<bool>> FindFullyShardedModules(const v1::ModuleTree& tree, const ManagedTree& managed,
                                                          const v1::Policy& policy);

}  // namespace shardd::plan_internal

#endif  // SHARDD_COMMON_PLAN_POLICY_INTERNAL_H_
