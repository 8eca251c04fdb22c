#ifndef SHARDD_COMMON_PLAN_EXTEND_H_
#define SHARDD_COMMON_PLAN_EXTEND_H_

// Extends a job to train more parameters: unfreezes what was frozen, adds an optimizer group. Pure.
//
// Parameters, groups, their order and both kinds of indices stay. Offsets in slabs and slots may change, because a
// group has separate flat parameters for what is trained and what is frozen.

#include <string>

#include "absl/status/statusor.h"
#include "common/plan/plan.h"

namespace shardd {

// Widens `asked` by everything that the job of `job` (planned as `plan`) has and `asked` does not mention: trained
// parameters, trainer_states and, unless `own_groups`, the job's optimizer groups. The result describes the same job as
// `job` if the two differ in nothing else. INVALID_ARGUMENT: `asked` is malformed.
absl::StatusOr<v1::JobSpec> Widened(const v1::JobSpec& asked, const v1::JobSpec& job, const ShardPlan& plan,
                                    bool own_groups);

struct Extension {
  v1::JobSpec spec;
  ShardPlan plan;
  std::string what;  // `parameter "a.b" (and 2 more)`, else `optimizer groups`; empty: nothing to extend
  // Parameters that were frozen. Else each of two specs extends the other one.
  bool trains_more = false;
};

// The job after a rank's request for `asked`. INVALID_ARGUMENT as PlanShards. FAILED_PRECONDITION: `asked` differs in
// something else; the text has the first difference.
absl::StatusOr<Extension> Extend(const v1::JobSpec& asked, const v1::JobSpec& job, const ShardPlan& plan);

// Whether `asked` describes what the job of `plan` was before it trained more: all that `asked` trains is trained, in
// the same optimizer group. INVALID_ARGUMENT as PlanShards.
absl::StatusOr<bool> DescribesEarlier(const v1::JobSpec& asked, const ShardPlan& plan);

}  // namespace shardd

#endif  // SHARDD_COMMON_PLAN_EXTEND_H_
