#ifndef SHARDD_CLIENT_C_API_SPEC_JSON_H_
#define SHARDD_CLIENT_C_API_SPEC_JSON_H_

// What comes as text: the job's specification and the environment; and what goes out as text: the plan.

#include <string>

#include "absl/status/statusor.h"
#include "common/plan/plan.h"
#include "shardd/v1/model.pb.h"

namespace shardd {

// Where a launcher (torchrun, mpirun wrappers) says who this process is.
struct LaunchEnvironment {
  int rank = -1;             // RANK, else LOCAL_RANK where all ranks are on this node; -1: neither
  int local_rank = -1;       // LOCAL_RANK; -1: not set
  int node = -1;             // SHARDD_NODE, else GROUP_RANK; -1: neither
  int world_size = 0;        // WORLD_SIZE; 0: not set
  int local_world_size = 0;  // LOCAL_WORLD_SIZE; 0: not set
  int grace_ms = 0;          // SHARDD_GRACE_MS; 0: not set
  int daemon_wait_ms = 0;    // SHARDD_DAEMON_WAIT_MS; 0: not set
};
// INVALID_ARGUMENT naming a variable that is no number in range.
absl::StatusOr<LaunchEnvironment> ReadLaunchEnvironment();

// INVALID_ARGUMENT with the parser's text. A world size of 0 is taken from `environment`: with nodes, of this one. So
// is a grace time that the specification does not give.
absl::StatusOr<v1::JobSpec> ParseSpecJson(const char* json, const LaunchEnvironment& environment);

// Groups, parameters and bytes by purpose, indented.
std::string PlanToJson(const v1::JobSpec& spec, const ShardPlan& plan);

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_API_SPEC_JSON_H_
