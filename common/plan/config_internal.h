#ifndef SHARDD_COMMON_PLAN_CONFIG_INTERNAL_H_
#define SHARDD_COMMON_PLAN_CONFIG_INTERNAL_H_

// Checks the job's configuration, fills in defaults, and gives it a text form for digests and comparisons.

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "shardd/v1/model.pb.h"

namespace shardd::plan_internal {

// INVALID_ARGUMENT: a value is out of range. UNIMPLEMENTED: a value is not served yet. Both name the field.
absl::StatusOr<v1::JobConfig> FillConfig(const v1::JobConfig& config, int world_size);

// Number of nodes over whose ranks one copy of everything is cut, a row of nodes; 1: each node has a whole copy. All
// nodes together are one row, or several that are replicas of each other. REQUIRES: `filled` has been through
// FillPlacement with this world size.
int NodesOfRow(const v1::JobConfig& filled, int world_size);

// INVALID_ARGUMENT for a dtype that nothing computes in: `<where>mixed_precision.param_dtype: ...`.
absl::Status CheckMixedPrecision(absl::string_view where, const v1::MixedPrecision& precision);

// Every field as {path, value} in order of field number, except the optimizer groups' FQNs, which are compared by
// parameter. Uses reflection, so that a field added to the proto cannot be forgotten.
std::vector<std::pair<std::string, std::string>> ConfigFields(const v1::JobConfig& filled);

}  // namespace shardd::plan_internal

#endif  // SHARDD_COMMON_PLAN_CONFIG_INTERNAL_H_
