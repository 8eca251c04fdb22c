#ifndef SHARDD_SERVER_COLLECTIVE_LOCAL_REDUCE_OPS_H_
#define SHARDD_SERVER_COLLECTIVE_LOCAL_REDUCE_OPS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/plan/plan.h"
#include "server/collective/collective.h"

namespace shardd {

struct RankSegment {
  int flat_param;
  Segment segment;
};

// Adjacent segments of one rank with the same treatment: one sum.
struct ReduceRun {
  int flat_param = -1;
  int64_t offset = 0;  // elements of the flat parameter
  int64_t numel = 0;
  GradientMode mode = GradientMode::kOverwrite;
  std::vector<int> sources;  // positions in ReduceScatterRequest.sources; never empty
};

// INVALID_ARGUMENT: there is no such group, or no plan.
absl::Status CheckGroup(const char* operation, const ShardPlan* plan, int group);
// INVALID_ARGUMENT: the request does not fit its plan, or the plan does not fit the number of ranks.
absl::Status CheckReduceScatter(const ReduceScatterRequest& request, size_t ranks);

// The sums over one rank's work segments, in order, without those that no source has a gradient for.
std::vector<ReduceRun> RunsOf(const ReduceScatterRequest& request, const std::vector<RankSegment>& segments);

// Offset of the run in a gradient slot.
int64_t SlotOffsetBytes(const ShardPlan& plan, const ReduceRun& run);
// The run's bytes in the slot of each of its sources.
std::vector<const void*> SourcesOf(const ReduceScatterRequest& request, const ReduceRun& run);

// Appends to `ops` of the device of `rank`: the sum of `sources` (each the run's own bytes) into the gradient shards,
// and the copies to replicas with gradient shards of their own, from the device that made the sum. With staging, the
// sum is made in pieces that fit; a piece that accumulates begins with the older value, and each is copied out when it
// is done. The bytes and the order of additions are the same.
void AddReduceOps(const ReduceScatterRequest& request, const ReduceRun& run, size_t rank,
                  std::vector<const void*> sources, std::vector<DeviceOp>& ops);

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_LOCAL_REDUCE_OPS_H_
