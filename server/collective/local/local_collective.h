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
#include "server/collective/local/reduce_runs.h"

namespace shardd {

// All ranks of the job on this node (AllGather, where parameters are cut over nodes: what this one holds): each device
// reads every rank's slot for its own work segments once and writes the gradient shards once. devices[r] is rank r's
// (several ranks may share one); they outlive this object and all requests.
//
// A device that has nothing to do for a request gets nothing; where no device has, `done` runs on the first one.
// Padding is neither read nor written by ReduceScatter. A malformed request is done with INVALID_ARGUMENT.
// Thread-safe.
class LocalCollective final : public Collective {
 public:
  // `why`: there is no other, for status; empty where none was asked for.
  explicit LocalCollective(std::vector<Device*> devices, std::string why = "");
  const char* name() const override { return "local"; }
  std::string Describe() const override { return why_.empty() ? "local" : "local: " + why_; }
  void ReduceScatter(ReduceScatterRequest request, Done done) override;
  void AllGather(AllGatherRequest request, Done done) override;

  // The sums that a reduction is made of, by the rank whose device writes them. INVALID_ARGUMENT as ReduceScatter.
  // Where parameters are cut over nodes: those of what `node`'s ranks of the same numbers hold.
  absl::StatusOr<std::vector<std::vector<ReduceRun>>> RunsByRank(const ReduceScatterRequest& request, int node);

 private:
  // By rank; the ranges of a group's trainable flat parameters.
  using GroupSegments = std::vector<std::vector<RankSegment>>;

  std::shared_ptr<const GroupSegments> SegmentsOf(const ShardPlan& plan, int group, int node)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Constant after construction.
  const std::vector<Device*> devices_;
  const std::string why_;

  // Guarded: what WorkSegments said, for the plan with this digest. A collective serves one job, hence one plan.
  absl::Mutex mutex_;
  std::string digest_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::pair<int, int>, std::shared_ptr<const GroupSegments>> segments_  // by group and node
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace shardd

#endif  // SHARDD_SERVER_COLLECTIVE_LOCAL_LOCAL_COLLECTIVE_H_
