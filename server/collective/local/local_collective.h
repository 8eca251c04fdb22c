#ifndef SHARDD_SERVER_COLLECTIVE_LOCAL_LOCAL_COLLECTIVE_H_
#define SHARDD_SERVER_COLLECTIVE_LOCAL_LOCAL_COLLECTIVE_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/collective/collective.h"
#include "server/collective/local/reduce_ops.h"

namespace shardd {

class Device;

// Collective for ranks that are all on this node. (AllGather gathers this node's part if parameters are cut over
// nodes.) Each device reads every rank's slot once for its own work segments and writes the gradient shards once.
// devices[r] is rank r's (several ranks may share one); devices outlive this object and all requests.
//
// A device without work for a request gets none; if no device has any, `done` runs on the first one. ReduceScatter
// neither reads nor writes padding. A malformed request ends with INVALID_ARGUMENT. Thread-safe.
class LocalCollective final : public Collective {
 public:
  // `why`: for status, why no other collective is used; empty if none was requested.
  explicit LocalCollective(std::vector<Device*> devices, std::string why = "");
  const char* name() const override { return "local"; }
  std::string Describe() const override { return why_.empty() ? "local" : "local: " + why_; }
  void ReduceScatter(ReduceScatterRequest request, Done done) override;
  void AllGather(AllGatherRequest request, Done done) override;

  // The sums of a reduction, by the rank whose device writes them. INVALID_ARGUMENT as ReduceScatter. If parameters are
  // cut over nodes, the sums for what `node`'s ranks of the same numbers hold.
  absl::StatusOr<std::vector<std::vector<ReduceRun>>> RunsByRank(const ReduceScatterRequest& request, int node);

 private:
  // By rank: the ranges of a group's trainable flat parameters.
  using GroupSegments = std::vector<std::vector<RankSegment>>;

  std::shared_ptr<const GroupSegments> SegmentsOf(const ShardPlan& plan, int group, int node)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Constant after construction.
  const std::vector<Device*> devices_;
  const std::string why_;

  // Guarded: cached WorkSegments of the plan with this digest. A collective serves one job, hence one plan.
  absl::Mutex mutex_;
  std::string digest_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::pair<int, int>, std::shared_ptr<const GroupSegments>> segments_  // by group and node
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_LOCAL_LOCAL_COLLECTIVE_H_
