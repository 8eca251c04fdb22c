#ifndef SHARDD_SERVER_MULTINODE_OTHER_ATTEMPTS_H_
#define SHARDD_SERVER_MULTINODE_OTHER_ATTEMPTS_H_

#include "common/plan/node_part.h"
#include "common/plan/plan.h"

namespace shardd {

// Whether others may have made a version in an attempt of which a node knows nothing: its copies, or its row's, go on
// without it. Where every part exists once a node in its place has nothing, which ends the job, so the version of a
// number is one; and values may be promised in an attempt, and said in the next.
inline bool OthersMayGoOn(const ShardPlan& plan) { return !plan.cut_over_nodes || HasRows(plan); }

}  // namespace shardd

#endif  // SHARDD_SERVER_MULTINODE_OTHER_ATTEMPTS_H_
