#ifndef SHARDD_COMMON_PLAN_MATRICES_H_
#define SHARDD_COMMON_PLAN_MATRICES_H_

// Parameters that their optimizer updates as whole matrices (OPTIMIZER_KIND_MUON). All of such a matrix lies in this
// node's memory, whoever holds which of its rows, so one rank's thread updates it for all: the ranks share these
// parameters out by matrix, and not by WorkSegments.

#include <vector>

#include "absl/status/status.h"
#include "common/plan/plan.h"

namespace shardd {

// Whether parameter `param` is one.
bool IsMatrix(const ShardPlan& plan, int param);

// INVALID_ARGUMENT, naming the parameter: it is one, and has not two dimensions; or the job spans several nodes.
absl::Status CheckMatrices(const ShardPlan& plan);

// By parameter: the rank whose thread updates it, -1 where it is no matrix or not `present`. The largest come first,
// each to the rank that has least to do, so that all are done at about the same time; no more ranks than matrices.
// Whoever changes this or MuonCost raises kTakeUpFormats: a log numbers what its rank updates, so another daemon that
// shares otherwise would read rank 0's log as one of other matrices.
std::vector<int> RanksOfMatrices(const ShardPlan& plan, const std::vector<bool>& present);

}  // namespace shardd

#endif  // SHARDD_COMMON_PLAN_MATRICES_H_
