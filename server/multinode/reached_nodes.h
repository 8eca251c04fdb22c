#ifndef SHARDD_SERVER_MULTINODE_REACHED_NODES_H_
#define SHARDD_SERVER_MULTINODE_REACHED_NODES_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "common/plan/plan.h"

namespace shardd {

// Which nodes of a job have a link to this one; of each that has none, why, and since when. Loop-confined.
class ReachedNodes {
 public:
  // This node is `node`, which reaches itself. The plan outlives it.
  ReachedNodes(const ShardPlan* plan, int node);
  // The others are not reached, from now on.
  void Start(absl::Time now);
  void OnUp(int node);
  // Returns whether it was reached; if not, it stays unreached since when it was, for another reason.
  bool OnDown(int node, absl::string_view why, absl::Time now);
  // Why a node that is not reached gets no link.
  void SetWhy(int node, absl::string_view why);

  bool reached(int node) const { return links_[static_cast<size_t>(node)].up; }
  bool all() const;
  const std::string& why(int node) const { return links_[static_cast<size_t>(node)].why; }
  // The first that is not: "node 1 (address) is not reached: why"; empty: all are.
  std::string Unreached() const;
  // The first that has not been for `grace`, each by a clock of its own, of the time behind `needed_since`, when others
  // began to be needed: that and for how long; empty: none.
  std::string UnreachedFor(absl::Time now, absl::Time needed_since, absl::Duration grace) const;

 private:
  struct Link {
    bool up = false;
    std::string why;   // not
    absl::Time since;  // it is not up
  };
  std::string Text(size_t node) const;

  const ShardPlan* const plan_;
  const int node_;
  std::vector<Link> links_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_MULTINODE_REACHED_NODES_H_
