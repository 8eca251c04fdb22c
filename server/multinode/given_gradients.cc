#include "server/multinode/given_gradients.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/plan/node_part.h"
#include "server/multinode/param_mask.h"

namespace shardd {
namespace {

// A node that gives the gradient in the place of what there is, and one that adds to it; -1: there is none.
struct Givers {
  int fresh = -1;
  int adding = -1;
};

template <typename Counts>
Givers FindGivers(const v1::PeerMessage::Go& go, size_t index, const Counts& counts) {
  Givers givers;
  for (int node = 0; node < go.gives_size(); ++node) {
    if (HasBit(go.gives(node).present(), index) && counts(node)) {
      (HasBit(go.gives(node).fresh(), index) ? givers.fresh : givers.adding) = node;
    }
  }
  return givers;
}

}  // namespace

absl::StatusOr<GivenGradients> GivenByAll(const ShardPlan& plan, const v1::PeerMessage::Go& go) {
  const GroupPlan& group = plan.groups[go.key().group()];
  GivenGradients given;
  given.sequence = go.sequence();
  absl::Status status;
  for (size_t i = 0; i < group.params.size(); ++i) {
    Givers givers = FindGivers(go, i, [](int) { return true; });
    if (givers.fresh >= 0 && givers.adding >= 0 && plan.cut_over_nodes) {
      // As ranks of one node: who holds nothing of it cannot tell.
      const Givers holders =
          FindGivers(go, i, [&](int node) { return NodeRangeOf(plan, group.params[i], node).numel > 0; });
      if (holders.fresh < 0 && holders.adding < 0) {
        givers.adding = -1;
      } else {
        givers = holders;
      }
    }
    if (givers.fresh >= 0 && givers.adding >= 0) {
      status = absl::FailedPreconditionError(absl::StrCat("SubmitGradients group \"", group.name, "\": gradient of \"",
                                                          plan.params[group.params[i]].fqn, "\" replaces on node ",
                                                          givers.fresh, " and adds on node ", givers.adding,
                                                          "; all nodes must do the same (step=", go.key().step(), ")"));
    }
    given.present.push_back(givers.fresh >= 0 || givers.adding >= 0);
    given.fresh.push_back(givers.fresh >= 0);
  }
  if (!status.ok()) {
    return status;
  }
  return given;
}

std::vector<bool> PresentOnHolders(const ShardPlan& plan, const std::vector<v1::PeerMessage::Reduced>& reduced) {
  const bool all_agree = std::all_of(reduced.begin(), reduced.end(), [&](const v1::PeerMessage::Reduced& of_node) {
    return of_node.present() == reduced[0].present();
  });
  if (all_agree) {
    return BitsOf(reduced[0].present(), plan.params.size());
  }
  std::vector<bool> present;
  for (size_t param = 0; param < plan.params.size(); ++param) {
    size_t holder = 0;
    while (holder < reduced.size() && NodeRangeOf(plan, static_cast<int>(param), static_cast<int>(holder)).numel == 0) {
      ++holder;
    }
    present.push_back(HasBit(reduced[holder < reduced.size() ? holder : 0].present(), param));
  }
  return present;
}

Norm NormOverNodes(const ShardPlan& plan, double order, const std::vector<v1::PeerMessage::Reduced>& reduced) {
  Norm total(order);
  for (size_t node = 0; node < static_cast<size_t>(NodesOfRow(plan)); ++node) {
    Norm part(order);
    part.set_state({reduced[node].norm_scale(), reduced[node].norm_sum()});
    total.Add(part);
  }
  return total;
}

}  // namespace shardd
