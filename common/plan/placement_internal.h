#ifndef SHARDD_COMMON_PLAN_PLACEMENT_INTERNAL_H_
#define SHARDD_COMMON_PLAN_PLACEMENT_INTERNAL_H_

#include <string>

#include "absl/status/status.h"
#include "shardd/v1/model.pb.h"

namespace shardd::plan_internal {

// Writes out shard_group_size, shard_groups and placement. INVALID_ARGUMENT names the field, the rank, got and want.
// REQUIRES: the strategy is filled.
absl::Status FillPlacement(v1::JobConfig& config, int world_size);

// "[[0, 1], [2, 3]]"
std::string ShardGroupsText(const v1::JobConfig& config);

}  // namespace shardd::plan_internal

#endif  // SHARDD_COMMON_PLAN_PLACEMENT_INTERNAL_H_
