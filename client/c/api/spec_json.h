#ifndef SHARDD_CLIENT_C_API_SPEC_JSON_H_
#define SHARDD_CLIENT_C_API_SPEC_JSON_H_

// What comes as text, the job's specification, and what goes out as text, the plan.

#include <string>

#include "absl/status/statusor.h"
#include "client/c/api/launch_environment.h"
#include "common/plan/plan.h"
#include "shardd/v1/model.pb.h"

namespace shardd {

// INVALID_ARGUMENT with the parser's text. A world size of 0 is taken from `environment`: with nodes, of this one. So
// is a grace time that the specification does not give.
absl::StatusOr<v1::JobSpec> ParseSpecJson(const char* json, const LaunchEnvironment& environment);

// Groups, parameters and bytes by purpose, indented.
std::string PlanToJson(const v1::JobSpec& spec, const ShardPlan& plan);

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_API_SPEC_JSON_H_
