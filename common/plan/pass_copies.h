#ifndef SHARDD_COMMON_PLAN_PASS_COPIES_H_
#define SHARDD_COMMON_PLAN_PASS_COPIES_H_

#include "common/plan/plan.h"

namespace shardd {

// Whether slab "parameters" holds the bytes of slab "shards" whenever a pass has begun, and until the next one: only
// trainers change shards, on this node alone, and passes read them all as they are stored, without copies for replicas.
bool PassesReadWhatIsStored(const ShardPlan& plan);

// Whether that may be the shards of the snapshot where slabs lie on the host, whose slab then has memory for the state
// alone. Not where the job says that some passes are to leave the snapshot as it is, because each makes the copies
// anew.
bool SnapshotMayBeInCopies(const ShardPlan& plan);

}  // namespace shardd

#endif  // SHARDD_COMMON_PLAN_PASS_COPIES_H_
