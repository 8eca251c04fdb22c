#ifndef SHARDD_COMMON_PLAN_LAYOUT_INTERNAL_H_
#define SHARDD_COMMON_PLAN_LAYOUT_INTERNAL_H_

// Last stage of PlanShards: groups with their parameters become flat parameters with offsets.

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/plan/plan.h"

namespace shardd::plan_internal {

constexpr int64_t RoundUp(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Elements between possible starts of parameters, and between shards of FLAT.
int64_t AlignmentNumel(const FlatParamPlan& flat);

// By whose placement trainers write shards: each its optimizer's part, or, to edit what the daemon updates, its shard.
Purpose WritersPurpose(const ShardPlan& plan);

// Fills plan.flat_params, the groups' flat_params, numel, image sizes and offsets within images, and the parameters'
// places, from plan.params (group, dtype, shape, ...), plan.groups[].params, plan.config and world sizes.
void LayOutFlatParams(ShardPlan& plan);

// What one place holds of a job that is cut over nodes, of every purpose. Empty where it, or the flat parameter, is not
// of the plan.
std::vector<Segment> PlaceSegments(const ShardPlan& plan, int flat_param, int place);

// OwnedRange by place. REQUIRES: both of the plan.
ParamRange PlaceRange(const ShardPlan& plan, Purpose purpose, int param, int place);

// Fills slab offsets, gradient slots, pool and memory. INVALID_ARGUMENT where the pool's size overflows.
absl::Status LayOutMemory(ShardPlan& plan);

}  // namespace shardd::plan_internal

#endif  // SHARDD_COMMON_PLAN_LAYOUT_INTERNAL_H_
