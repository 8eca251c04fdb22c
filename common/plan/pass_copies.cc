#include "common/plan/pass_copies.h"

#include <algorithm>

namespace shardd {

bool PassesReadWhatIsStored(const ShardPlan& plan) {
  return plan.nodes() == 1 && plan.config.pass_copies() &&
         plan.config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER && plan.shard_copies == 1 &&
         std::all_of(plan.flat_params.begin(), plan.flat_params.end(),
                     [](const FlatParamPlan& flat) { return flat.unsharded_dtype == flat.dtype; });
}

bool SnapshotMayBeInCopies(const ShardPlan& plan) {
  const bool with_each_pass = plan.snapshots_by_cost || plan.config.keep_every() <= 1;
  return PassesReadWhatIsStored(plan) && plan.memory.kept_bytes > 0 && with_each_pass;
}

}  // namespace shardd
