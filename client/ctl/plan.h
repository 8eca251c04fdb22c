#ifndef SHARDD_CLIENT_CTL_PLAN_H_
#define SHARDD_CLIENT_CTL_PLAN_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "shardd/v1/jobs.pb.h"
#include "shardd/v1/model.pb.h"

namespace shardd::ctl {

// `shardctl plan`: what memory a model will need on a node, before anything runs. No daemon is asked; these are the
// numbers that it will plan, by the same code (common/plan).
struct PlannedModel {
  v1::Memory memory;  // planned bytes by purpose, of one node with all its ranks: the one that needs most
  std::string text;   // as a table, by node and rank
};

// Reads a shardd.v1.JobSpec in proto3 JSON, for `world` ranks in all, on `nodes` nodes; 0: as it says itself.
// INVALID_ARGUMENT: it is none, it says nothing of ranks, or they are not equally many on all nodes.
absl::StatusOr<v1::JobSpec> ReadModel(absl::string_view json, int world, int nodes);

// Plans what ReadModel reads. `on_gpus`: ranks have GPUs, which get parameters that are cut over nodes by NCCL. Errors
// as ReadModel and PlanShards.
absl::StatusOr<PlannedModel> PlanModel(absl::string_view json, int world, int nodes, bool on_gpus);

// All of a file; "-": of standard input. FAILED_PRECONDITION: it cannot be read.
absl::StatusOr<std::string> ReadTextFile(const std::string& file);

}  // namespace shardd::ctl

#endif  // SHARDD_CLIENT_CTL_PLAN_H_
