#include "common/plan/matrices.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <queue>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/plan/node_part.h"
#include "common/plan/optimizer_kinds.h"
#include "common/plan/tree_internal.h"
#include "common/tensor/muon.h"

namespace shardd {
namespace {

// Of their shares alone: what steps really take is not known when ranks share.
constexpr int kUsualSteps = 5;

bool IsMuons(const v1::OptimizerConfig& optimizer, int group) {
  const bool has_none = group == 0 && HasSeveralOptimizers(optimizer);
  return group >= 0 && !has_none && OptimizerKindOf(optimizer, group) == v1::OPTIMIZER_KIND_MUON;
}

// By parameter: which of `shares` has it, -1 where it is no matrix or not `present`. The largest come first, each to
// the share that has least.
std::vector<int> ShareOut(const ShardPlan& plan, int shares, const std::vector<bool>& present) {
  struct Matrix {
    size_t param;
    double cost;
  };
  std::vector<int> share_of(plan.params.size(), -1);
  std::vector<Matrix> matrices;
  for (size_t p = 0; p < plan.params.size(); ++p) {
    const ParamPlan& param = plan.params[p];
    if (!present[p] || param.numel == 0 || !IsMatrix(plan, static_cast<int>(p))) continue;
    matrices.push_back({p, MuonCost(param.shape[0], param.shape[1], kUsualSteps)});
  }
  std::stable_sort(matrices.begin(), matrices.end(), [](const Matrix& a, const Matrix& b) { return a.cost > b.cost; });
  using Load = std::pair<double, int>;  // of which share
  std::priority_queue<Load, std::vector<Load>, std::greater<>> least;
  for (int share = 0; share < shares; ++share) least.emplace(0.0, share);
  for (const Matrix& matrix : matrices) {
    const auto [load, share] = least.top();
    least.pop();
    least.emplace(load + matrix.cost, share);
    share_of[matrix.param] = share;
  }
  return share_of;
}

}  // namespace

bool IsMatrix(const ShardPlan& plan, int param) {
  return IsMuons(plan.config.optimizer(), plan.params[static_cast<size_t>(param)].optimizer_group);
}

absl::Status CheckMatrices(const ShardPlan& plan) {
  for (size_t p = 0; p < plan.params.size(); ++p) {
    if (!IsMatrix(plan, static_cast<int>(p))) continue;
    const ParamPlan& param = plan.params[p];
    if (param.shape.size() != 2) {
      return absl::InvalidArgumentError(
          absl::StrCat("plan parameter ", plan_internal::Quoted(param.fqn),
                       ": OPTIMIZER_KIND_MUON updates matrices alone (got ", param.shape.size(),
                       " dimensions, want 2); give it to another optimizer, in a group with a kind of its own "
                       "(OptimizerConfig.Group.kind), or freeze it"));
    }
    if (HasRows(plan)) {
      return absl::UnimplementedError(
          absl::StrCat("plan parameter ", plan_internal::Quoted(param.fqn),
                       ": OPTIMIZER_KIND_MUON is not served where shard groups span nodes and have replicas (got ",
                       plan.nodes(), " nodes in rows of ", NodesOfRow(plan),
                       "); use shard groups of one node (replicas), one over all nodes, or another kind"));
    }
  }
  return absl::OkStatus();
}

void PlaceMatrices(ShardPlan& plan) {
  if (!plan.cut_over_nodes) return;
  const int nodes = NodesOfRow(plan);
  const std::vector<int> shares = ShareOut(plan, nodes * plan.world_size, std::vector<bool>(plan.params.size(), true));
  for (size_t p = 0; p < shares.size(); ++p) {
    if (shares[p] < 0) continue;
    const int node = shares[p] % nodes, rank = shares[p] / nodes;
    plan.params[p].whole_at = node * plan.world_size + rank;
  }
}

int PlaceOfMatrix(const ShardPlan& plan, int param) { return plan.params[static_cast<size_t>(param)].whole_at; }

std::vector<int> RanksOfMatrices(const ShardPlan& plan, const std::vector<bool>& present) {
  if (!plan.cut_over_nodes) return ShareOut(plan, plan.world_size, present);
  std::vector<int> ranks(plan.params.size(), -1);
  for (size_t p = 0; p < ranks.size(); ++p) {
    const int place = PlaceOfMatrix(plan, static_cast<int>(p));
    if (present[p] && place >= 0 && place / plan.world_size == plan.node) ranks[p] = place % plan.world_size;
  }
  return ranks;
}

}  // namespace shardd
