#ifndef SHARDD_COMMON_PLAN_MATRICES_H_
#define SHARDD_COMMON_PLAN_MATRICES_H_

// Parameters that their optimizer updates as whole matrices (OPTIMIZER_KIND_MUON). All of such a matrix lies in a
// node's memory, whoever holds which of its rows there, so one rank's thread updates it for all: the ranks share these
// parameters out by matrix, and not by WorkSegments. Where parameters are cut over nodes a matrix is not cut: one rank
// of one node holds all of it, reduces its gradient and updates it.

#include <vector>

#include "absl/status/status.h"
#include "common/plan/plan.h"

namespace shardd {

// Whether parameter `param` is one.
bool IsMatrix(const ShardPlan& plan, int param);

// INVALID_ARGUMENT, naming the parameter: it is one, and has not two dimensions.
absl::Status CheckMatrices(const ShardPlan& plan);

// Gives matrices a place where parameters are cut over nodes. The largest come first, each to the rank of all nodes
// that has least to do; of several such ranks to one of lower number, then of a lower node, so that nodes get as many.
// REQUIRES: optimizer groups are assigned.
void PlaceMatrices(ShardPlan& plan);
// The place that has all of the parameter; -1: it is cut as the placement says.
int PlaceOfMatrix(const ShardPlan& plan, int param);

// By parameter: the rank of this node whose thread updates it, -1 where it is no matrix, not `present`, or another
// node's. Where parameters are cut over nodes it is the one that holds it. Otherwise the largest come first, each to
// the rank that has least to do, so that all are done at about the same time; no more ranks than matrices. Whoever
// changes this or MuonCost raises kTakeUpFormats (places over nodes are in the plan's digest): a log numbers what its
// rank updates, so another daemon that shares otherwise would read rank 0's log as one of other matrices.
std::vector<int> RanksOfMatrices(const ShardPlan& plan, const std::vector<bool>& present);

}  // namespace shardd

#endif  // SHARDD_COMMON_PLAN_MATRICES_H_
