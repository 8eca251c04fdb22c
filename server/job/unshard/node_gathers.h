#ifndef SHARDD_SERVER_JOB_UNSHARD_NODE_GATHERS_H_
#define SHARDD_SERVER_JOB_UNSHARD_NODE_GATHERS_H_

// Unshards of a job whose parameters are cut over nodes: this node holds a part of each group and asks the other nodes
// for theirs where a group is unsharded (collective/nodes/node_gather.h). No node waits for another one's order: a
// version does not change before all nodes have reduced a step, and a node that gathers has not.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/collective/nodes/node_gather.h"

namespace shardd {

// Owns the NodeGather, and the gathers that wait for the next generation or until all nodes are reached. Loop-confined.
class NodeGathers {
 public:
  // `unreached` names a node that has no link to this one, empty if all have; called on the loop. `post` runs its
  // argument on the loop; any thread calls it while a gather's `done` is alive, which has to keep this alive.
  NodeGathers(std::unique_ptr<NodeGather> gather, std::function<std::string()> unreached,
              std::function<void(absl::AnyInvocable<void()>)> post);

  struct Request {
    int group = 0;
    uint64_t version = 0;
    char* destination = nullptr;
    std::string label;
    std::function<void(absl::Status)> done;  // any thread, once; ABORTED: the epoch has ended
    absl::Time since;
  };
  // Brings the other nodes' parts of the group to `destination`. A generation that ends before is no error: the gather
  // goes on in the next one, as long as the epoch lasts.
  void Gather(Request request);
  // The link to a node is there (again).
  void Retry();
  void BeginGeneration(uint64_t generation);
  // Ends all gathers with ABORTED: at once those that wait, the others when they come back.
  void EndEpoch();
  // Refuses whatever other nodes ask for from here on. REQUIRES: EndEpoch was called.
  void EndJob();
  // As NodeGather::SetReadable.
  void SetReadable(uint64_t version) { gather_->SetReadable(version); }

  // DEADLINE_EXCEEDED: a gather has waited longer than `limit`.
  absl::Status CheckDeadlines(absl::Time now, absl::Duration limit) const;
  // What a rank whose group is being gathered waits for.
  std::string WaitText(absl::Time now) const;
  std::string Describe() const { return gather_->Describe(); }

 private:
  void GatherInEpoch(uint64_t epoch, Request request);

  const std::unique_ptr<NodeGather> gather_;
  const std::function<std::string()> unreached_;
  const std::function<void(absl::AnyInvocable<void()>)> post_;
  uint64_t generation_ = 0;
  uint64_t epoch_ = 0;            // its own count
  std::vector<Request> waiting_;  // of this epoch
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_UNSHARD_NODE_GATHERS_H_
