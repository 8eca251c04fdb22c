#include "common/plan/whole_params.h"

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

// Of Muon or Adafactor; UNSPECIFIED: of another kind, or none.
v1::OptimizerKind WholeKindOf(const ShardPlan& plan, int param) {
  const v1::OptimizerConfig& optimizer = plan.config.optimizer();
  const int group = plan.params[static_cast<size_t>(param)].optimizer_group;
  const bool has_none = group == 0 && HasSeveralOptimizers(optimizer);
  if (group < 0 || has_none) return v1::OPTIMIZER_KIND_UNSPECIFIED;
  const v1::OptimizerKind kind = OptimizerKindOf(optimizer, group);
  const bool is_whole = kind == v1::OPTIMIZER_KIND_MUON || kind == v1::OPTIMIZER_KIND_ADAFACTOR;
  return is_whole ? kind : v1::OPTIMIZER_KIND_UNSPECIFIED;
}

// By parameter: which of `shares` has it, -1 where it is not updated whole or not `present`. The largest come first,
// each to the share that has least.
std::vector<int> ShareOut(const ShardPlan& plan, int shares, const std::vector<bool>& present) {
  struct Whole {
    size_t param;
    double cost;
  };
  std::vector<int> share_of(plan.params.size(), -1);
  std::vector<Whole> wholes;
  for (size_t p = 0; p < plan.params.size(); ++p) {
    const ParamPlan& param = plan.params[p];
    const v1::OptimizerKind kind = WholeKindOf(plan, static_cast<int>(p));
    if (!present[p] || param.numel == 0 || kind == v1::OPTIMIZER_KIND_UNSPECIFIED) continue;
    wholes.push_back({p, kind == v1::OPTIMIZER_KIND_MUON ? MuonCost(param.shape[0], param.shape[1], kUsualSteps)
                                                         : AdafactorCost(AdafactorShapeOf(param))});
  }
  std::stable_sort(wholes.begin(), wholes.end(), [](const Whole& a, const Whole& b) { return a.cost > b.cost; });
  using Load = std::pair<double, int>;  // of which share
  std::priority_queue<Load, std::vector<Load>, std::greater<>> least;
  for (int share = 0; share < shares; ++share) least.emplace(0.0, share);
  for (const Whole& whole : wholes) {
    const auto [load, share] = least.top();
    least.pop();
    least.emplace(load + whole.cost, share);
    share_of[whole.param] = share;
  }
  return share_of;
}

}  // namespace

bool IsUpdatedWhole(const ShardPlan& plan, int param) {
  return WholeKindOf(plan, param) != v1::OPTIMIZER_KIND_UNSPECIFIED;
}

absl::Status CheckWholeParams(const ShardPlan& plan) {
  for (size_t p = 0; p < plan.params.size(); ++p) {
    const v1::OptimizerKind kind = WholeKindOf(plan, static_cast<int>(p));
    if (kind == v1::OPTIMIZER_KIND_UNSPECIFIED) continue;
    const ParamPlan& param = plan.params[p];
    if (kind == v1::OPTIMIZER_KIND_MUON && param.shape.size() != 2) {
      return absl::InvalidArgumentError(
          absl::StrCat("plan parameter ", plan_internal::Quoted(param.fqn),
                       ": OPTIMIZER_KIND_MUON updates matrices alone (got ", param.shape.size(),
                       " dimensions, want 2); give it to another optimizer, in a group with a kind of its own "
                       "(OptimizerConfig.Group.kind), or freeze it"));
    }
    if (HasRows(plan)) {
      return absl::UnimplementedError(absl::StrCat(
          "plan parameter ", plan_internal::Quoted(param.fqn), ": ", OptimizerKindText(kind),
          " is not served where shard groups span nodes and have replicas (got ", plan.nodes(), " nodes in rows of ",
          NodesOfRow(plan), "); use shard groups of one node (replicas), one over all nodes, or another kind"));
    }
  }
  return absl::OkStatus();
}

void PlaceWholeParams(ShardPlan& plan) {
  if (!plan.cut_over_nodes) return;
  const int nodes = NodesOfRow(plan);
  const std::vector<int> shares = ShareOut(plan, nodes * plan.world_size, std::vector<bool>(plan.params.size(), true));
  for (size_t p = 0; p < shares.size(); ++p) {
    if (shares[p] < 0) continue;
    const int node = shares[p] % nodes, rank = shares[p] / nodes;
    plan.params[p].whole_at = node * plan.world_size + rank;
  }
}

int PlaceOfWhole(const ShardPlan& plan, int param) { return plan.params[static_cast<size_t>(param)].whole_at; }

std::vector<int> RanksOfWholeParams(const ShardPlan& plan, const std::vector<bool>& present) {
  if (!plan.cut_over_nodes) return ShareOut(plan, plan.world_size, present);
  std::vector<int> ranks(plan.params.size(), -1);
  for (size_t p = 0; p < ranks.size(); ++p) {
    const int place = PlaceOfWhole(plan, static_cast<int>(p));
    if (present[p] && place >= 0 && place / plan.world_size == plan.node) ranks[p] = place % plan.world_size;
  }
  return ranks;
}

std::string WholeText(const ShardPlan& plan, int param) {
  const v1::OptimizerKind kind = WholeKindOf(plan, param);
  return absl::StrCat(kind == v1::OPTIMIZER_KIND_MUON ? "a matrix of " : "a parameter of ", OptimizerKindText(kind));
}

int64_t WholeWorkspaceBytes(const ShardPlan& plan, int param) {
  const ParamPlan& of = plan.params[static_cast<size_t>(param)];
  const v1::OptimizerKind kind = WholeKindOf(plan, param);
  if (kind == v1::OPTIMIZER_KIND_UNSPECIFIED) return 0;
  return kind == v1::OPTIMIZER_KIND_MUON ? MuonWorkspaceBytes(of.shape[0], of.shape[1])
                                         : AdafactorWorkspaceBytes(AdafactorShapeOf(of));
}

AdafactorShape AdafactorShapeOf(const ParamPlan& param) {
  AdafactorShape shape;
  const size_t dims = param.shape.size();
  if (dims < 2) {
    shape.cols = param.numel;
    return shape;
  }
  shape.is_factored = true;
  shape.rows = param.shape[dims - 2];
  shape.cols = param.shape[dims - 1];
  shape.matrices = param.numel == 0 ? 0 : param.numel / (shape.rows * shape.cols);
  return shape;
}

int64_t StateNumel(const ShardPlan& plan, int param, int state) {
  const ParamPlan& of = plan.params[static_cast<size_t>(param)];
  if (WholeKindOf(plan, param) != v1::OPTIMIZER_KIND_ADAFACTOR) return of.numel;
  const AdafactorShape shape = AdafactorShapeOf(of);
  return state == 0 ? shape.row_numel() : state == 1 ? shape.col_numel() : 0;
}

bool HasShortStates(const ShardPlan& plan) {
  for (size_t p = 0; p < plan.params.size(); ++p) {
    if (WholeKindOf(plan, static_cast<int>(p)) == v1::OPTIMIZER_KIND_ADAFACTOR) return true;
  }
  return false;
}

}  // namespace shardd
