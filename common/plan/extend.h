#ifndef SHARDD_COMMON_PLAN_EXTEND_H_
#define SHARDD_COMMON_PLAN_EXTEND_H_

// A job that trains more parameters than it did: what was frozen is unfrozen, an optimizer group is added. Pure.
//
// Parameters, groups and their order stay what they are, and so do indices of both. Only where things lie in slabs and
// slots is another matter, because a group has one flat parameter for what is trained and one for what is not.

#include <string>

#include "absl/status/statusor.h"
#include "common/plan/plan.h"

namespace shardd {

// `asked` with everything that the job of `job` (planned as `plan`) has and `asked` does not say: parameters trained,
// trainer_states, and, unless `own_groups`, the job's optimizer groups. The same job as `job` where the two differ in
// nothing else. INVALID_ARGUMENT where `asked` is malformed.
absl::StatusOr<v1::JobSpec> Widened(const v1::JobSpec& asked, const v1::JobSpec& job, const ShardPlan& plan,
                                    bool own_groups);

struct Extension {
  v1::JobSpec spec;
  ShardPlan plan;
  std::string what;  // `parameter "a.b" (and 2 more)`, else `optimizer groups`; empty: the job is that already
};

// What becomes of the job where a rank asks for `asked`. INVALID_ARGUMENT as PlanShards; FAILED_PRECONDITION where
// `asked` differs in more than what may be added: with the first difference.
absl::StatusOr<Extension> Extend(const v1::JobSpec& asked, const v1::JobSpec& job, const ShardPlan& plan);

}  // namespace shardd

#endif  // SHARDD_COMMON_PLAN_EXTEND_H_
