#ifndef SHARDD_COMMON_PLAN_WHOLE_PARAMS_H_
#define SHARDD_COMMON_PLAN_WHOLE_PARAMS_H_

// Parameters that their optimizer updates whole: the matrices of OPTIMIZER_KIND_MUON, and all that
// OPTIMIZER_KIND_ADAFACTOR has. All of such a parameter lies in a node's memory, whoever holds which of its rows there,
// so one rank's thread updates it for all: the ranks share these parameters out whole, and not by WorkSegments. Where
// parameters are cut over nodes these are not: one rank of one node holds all of such a parameter, reduces its gradient
// and updates it.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/plan/plan.h"
#include "common/tensor/adafactor.h"

namespace shardd {

// Whether parameter `param` is one.
bool IsUpdatedWhole(const ShardPlan& plan, int param);

// INVALID_ARGUMENT, naming the parameter: Muon has it, and it has not two dimensions. UNIMPLEMENTED: it is one, and
// shard groups span nodes and have replicas.
absl::Status CheckWholeParams(const ShardPlan& plan);

// Gives them a place where parameters are cut over nodes. The largest come first, each to the rank of all nodes
// that has least to do; of several such ranks to one of lower number, then of a lower node, so that nodes get as many.
// REQUIRES: optimizer groups are assigned.
void PlaceWholeParams(ShardPlan& plan);
// The place that has all of the parameter; -1: it is cut as the placement says.
int PlaceOfWhole(const ShardPlan& plan, int param);

// By parameter: the rank of this node whose thread updates it, -1 where it is none of them, not `present`, or another
// node's. Where parameters are cut over nodes it is the one that holds it. Otherwise the largest come first, each to
// the rank that has least to do, so that all are done at about the same time; no more ranks than such parameters.
// Whoever changes this, MuonCost or AdafactorCost raises kTakeUpFormats (places over nodes are in the plan's digest): a
// log numbers what its rank updates, so another daemon that shares otherwise would read rank 0's log as one of other
// parameters.
std::vector<int> RanksOfWholeParams(const ShardPlan& plan, const std::vector<bool>& present);

// "a matrix of OPTIMIZER_KIND_MUON", "a parameter of OPTIMIZER_KIND_ADAFACTOR". REQUIRES: it is one.
std::string WholeText(const ShardPlan& plan, int param);

// What one thread needs to update it; 0: it is none of them. REQUIRES: CheckWholeParams.
int64_t WholeWorkspaceBytes(const ShardPlan& plan, int param);

// What a parameter is to Adafactor.
AdafactorShape AdafactorShapeOf(const ParamPlan& param);

// Elements of optimizer state `state` that a parameter has, from the start of the place that the state has for it: the
// parameter's, or of Adafactor those of its rows or columns (AdafactorShape), or none.
int64_t StateNumel(const ShardPlan& plan, int param, int state);
// Whether a parameter has a state with fewer elements than it has itself.
bool HasShortStates(const ShardPlan& plan);

}  // namespace shardd

#endif  // SHARDD_COMMON_PLAN_WHOLE_PARAMS_H_
