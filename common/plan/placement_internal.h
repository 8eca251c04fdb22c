#ifndef SHARDD_COMMON_PLAN_PLACEMENT_INTERNAL_H_
#define SHARDD_COMMON_PLAN_PLACEMENT_INTERNAL_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "shardd/v1/model.pb.h"

namespace shardd::plan_internal {

// INVALID_ARGUMENT: shard_groups list more groups or ranks than the job has ranks. What passes is small enough to be
// copied and printed.
absl::Status CheckShardGroupCount(const v1::JobConfig& config, int world_size);

// Fills in shard_group_size, shard_groups and placement. INVALID_ARGUMENT names the field, the rank, got and want.
// REQUIRES: the strategy is filled in, and CheckShardGroupCount returned OK.
absl::Status FillPlacement(v1::JobConfig& config, int world_size);

// "[[0, 1], [2, 3]]"
std::string ShardGroupsText(const v1::JobConfig& config);

// `text` cut to 1 KiB, with a count of what is cut off: errors travel in gRPC's metadata, which has 8 KiB.
std::string Shortened(absl::string_view text);

}  // namespace shardd::plan_internal

#endif  // SHARDD_COMMON_PLAN_PLACEMENT_INTERNAL_H_
