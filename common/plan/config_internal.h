#ifndef SHARDD_COMMON_PLAN_CONFIG_INTERNAL_H_
#define SHARDD_COMMON_PLAN_CONFIG_INTERNAL_H_

// The job's configuration, checked and with its defaults written out, and a text of it for digests and comparisons.

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "shardd/v1/model.pb.h"

namespace shardd::plan_internal {

// INVALID_ARGUMENT for values out of range, UNIMPLEMENTED for what is not served; both name the field.
absl::StatusOr<v1::JobConfig> FillConfig(const v1::JobConfig& config, int world_size);

// One copy of everything is cut over all ranks, of all nodes where there are several. REQUIRES: a strategy of the
// table.
bool IsCutOverWorld(v1::Strategy strategy);

// INVALID_ARGUMENT for a dtype that nothing is computed in: `<where>mixed_precision.param_dtype: ...`.
absl::Status CheckMixedPrecision(absl::string_view where, const v1::MixedPrecision& precision);

// Every field but the optimizer groups' FQNs (those are compared parameter by parameter), as {path, value}, in order of
// field number. Made by reflection, so that a field added to the proto cannot be forgotten.
std::vector<std::pair<std::string, std::string>> ConfigFields(const v1::JobConfig& filled);

// fp32 tensors of optimizer state per parameter.
int OptimizerStates(const v1::OptimizerConfig& optimizer);

}  // namespace shardd::plan_internal

#endif  // SHARDD_COMMON_PLAN_CONFIG_INTERNAL_H_
