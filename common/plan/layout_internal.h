#ifndef SHARDD_COMMON_PLAN_LAYOUT_INTERNAL_H_
#define SHARDD_COMMON_PLAN_LAYOUT_INTERNAL_H_

// Last stage of PlanShards: turns groups with their parameters into flat parameters with offsets.

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/plan/plan.h"

namespace shardd::plan_internal {

constexpr int64_t RoundUp(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Granularity in elements of the starts of parameters, and of FLAT's shards.
int64_t AlignmentNumel(const FlatParamPlan& flat);

// Whether some of its parameters are whole at one place (PlaceOfWhole).
bool HasWhole(const ShardPlan& plan, const FlatParamPlan& flat);

// The placement by which trainers write shards: the optimizer's if trainers run it, else, for edits, the parameters'.
Purpose WritersPurpose(const ShardPlan& plan);

// Number of ranks among which everything is placed: those of this node, or of a row of nodes.
inline int Places(const ShardPlan& plan) { return static_cast<int>(plan.placement.shard_index.size()); }

// Fills plan.flat_params, the groups' flat_params, numel, image sizes and offsets within images, and the parameters'
// positions, from plan.params (group, dtype, shape, ...), plan.groups[].params, plan.config and world sizes.
void LayOutFlatParams(ShardPlan& plan);

// Everything that one place holds in a job that is cut over nodes, for every purpose. Empty if the plan has no such
// place or flat parameter.
std::vector<Segment> PlaceSegments(const ShardPlan& plan, int flat_param, int place);

// OwnedRange by place. REQUIRES: the plan has both.
ParamRange PlaceRange(const ShardPlan& plan, Purpose purpose, int param, int place);

// Fills slab offsets, gradient slots, pool and memory. INVALID_ARGUMENT: the pool's size overflows.
absl::Status LayOutMemory(ShardPlan& plan);

}  // namespace shardd::plan_internal

#endif  // SHARDD_COMMON_PLAN_LAYOUT_INTERNAL_H_
