#ifndef SHARDD_SERVER_MULTINODE_SAME_JOB_H_
#define SHARDD_SERVER_MULTINODE_SAME_JOB_H_

// Whether the daemons of several nodes mean the same job by its name, also where some of them have missed that it
// trains more by now; and what of that is served over nodes.

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "common/plan/extend.h"
#include "common/plan/plan.h"
#include "shardd/v1/peer.pb.h"

namespace shardd {

// UNIMPLEMENTED: a job of `plan` that spans several nodes cannot train more once it is open. OK on one node.
absl::Status CheckExtendsOverNodes(const ShardPlan& plan, bool on_gpus);
// UNIMPLEMENTED: a job of `plan` that spans several nodes cannot become `extension`. It trains nothing new, so that
// nodes could not tell which of two descriptions is the later one; or parts of parameters would have to move between
// nodes. OK on one node, and where nothing is extended.
absl::Status CheckExtension(const ShardPlan& plan, const Extension& extension);

// This node's part of a job, as other nodes are compared with it. Thread-safe.
class OwnJob {
 public:
  // `data_path` as PeerHello.
  OwnJob(v1::JobSpec spec, std::string serialized, std::shared_ptr<const ShardPlan> plan, std::string data_path,
         bool on_gpus);

  // Hears what this node has missed, perhaps again and again.
  using Missed = std::function<void(std::shared_ptr<const Extension>)>;
  // Whether the other node describes this job, and its gradients move as here. A node that has missed an extension
  // describes what was trained before. Only a node that has parameters (`has_parameters`: this one) can say that all
  // have agreed on more:
  // - the other one: UNAVAILABLE, and `missed` is called;
  // - this one: OK, and the other node learns it from this node's answer;
  // - the one that trains more has none, and the one that trains less has: UNAVAILABLE. Either that one is told by a
  //   third node, or what trains more is another job, whose ranks are told when they have waited for too long.
  // UNIMPLEMENTED: the other daemon plans the same description otherwise, as a build that does not know an option does.
  // The link stays down until that daemon is upgraded.
  // FAILED_PRECONDITION: it is another job. The caller's ends with that.
  absl::Status CheckSame(const v1::PeerHello& hello, bool has_parameters, const Missed& missed)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  std::shared_ptr<const Extension> KnownAsMissed(const v1::PeerHello& hello) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status CheckSize(const v1::PeerHello& hello, bool may_train_more) const;
  absl::Status ComparePlans(const v1::PeerHello& hello, bool has_parameters, const Missed& missed)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // What an answer depends on.
  struct Asked {
    size_t spec_hash = 0;
    bool takes_extensions = false;
    bool has_parameters = false;
    bool own_parameters = false;
    std::string plan_digest = {};
    bool operator==(const Asked&) const = default;
  };

  const v1::JobSpec spec_;
  const std::string serialized_;
  const std::shared_ptr<const ShardPlan> plan_;
  const std::string data_path_;
  const bool on_gpus_;
  // What was missed last, and the hash of the description that said so: nodes call again until it is there, and
  // planning a description takes long.
  absl::Mutex mutex_;
  std::shared_ptr<const Extension> missed_ ABSL_GUARDED_BY(mutex_);
  size_t missed_hash_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<int, std::pair<Asked, absl::Status>> answers_ ABSL_GUARDED_BY(mutex_);  // the last one to each node
};

}  // namespace shardd

#endif  // SHARDD_SERVER_MULTINODE_SAME_JOB_H_
