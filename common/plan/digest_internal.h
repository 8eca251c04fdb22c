#ifndef SHARDD_COMMON_PLAN_DIGEST_INTERNAL_H_
#define SHARDD_COMMON_PLAN_DIGEST_INTERNAL_H_

#include <string>

#include "absl/status/statusor.h"
#include "common/plan/plan.h"

namespace shardd::plan_internal {

// SHA-256, 32 bytes, over everything in a finished plan that ranks and daemon must agree on: world size, configuration,
// managed parameters and groups. Names of unmanaged modules, classes and wrappers do not count. INTERNAL: the
// cryptography library has no SHA-256.
absl::StatusOr<std::string> PlanDigest(const ShardPlan& plan);

}  // namespace shardd::plan_internal

#endif  // SHARDD_COMMON_PLAN_DIGEST_INTERNAL_H_
