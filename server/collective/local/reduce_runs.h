#ifndef SHARDD_SERVER_COLLECTIVE_LOCAL_REDUCE_RUNS_H_
#define SHARDD_SERVER_COLLECTIVE_LOCAL_REDUCE_RUNS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/plan/plan.h"
#include "server/collective/collective.h"
#include "server/device/device.h"

namespace shardd {

struct RankSegment {
  int flat_param;
  Segment segment;
};

// Segments of one rank that touch and are treated alike: one sum.
struct ReduceRun {
  int flat_param = -1;
  int64_t offset = 0;  // elements of the flat parameter
  int64_t numel = 0;
  GradientMode mode = GradientMode::kOverwrite;
  std::vector<int> sources;  // positions in ReduceScatterRequest.sources; never empty
};

// INVALID_ARGUMENT: no such group, or no plan.
absl::Status CheckGroup(const char* operation, const ShardPlan* plan, int group);
// INVALID_ARGUMENT: the request does not fit its plan, or the plan so many ranks.
absl::Status CheckReduceScatter(const ReduceScatterRequest& request, size_t ranks);

// The sums over one rank's work segments, in their order; what no source has a gradient for is left out.
std::vector<ReduceRun> RunsOf(const ReduceScatterRequest& request, const std::vector<RankSegment>& segments);

// The run's bytes in a gradient slot, from the slot's start.
int64_t SlotOffsetBytes(const ShardPlan& plan, const ReduceRun& run);
// The run's bytes in the slot of each of its sources.
std::vector<const void*> SourcesOf(const ReduceScatterRequest& request, const ReduceRun& run);

// Adds to `ops`, of the device of `rank`: the sum of `sources`, each the run's own bytes, into the gradient shards, and
// its copies to replicas that have gradient shards of their own, from the device that made it. With staging: in pieces
// that fit into it, each of which begins with the older sum where it is added to, and is copied when it is there; the
// bytes and the order of the sums are the same.
void AddReduceOps(const ReduceScatterRequest& request, const ReduceRun& run, size_t rank,
                  std::vector<const void*> sources, std::vector<DeviceOp>& ops);

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_LOCAL_REDUCE_RUNS_H_
