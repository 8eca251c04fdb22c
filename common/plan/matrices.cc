#include "common/plan/matrices.h"

#include <algorithm>
#include <cstddef>
#include <iterator>

#include "absl/strings/str_cat.h"
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
    if (plan.nodes() > 1) {
      return absl::InvalidArgumentError(absl::StrCat("plan parameter ", plan_internal::Quoted(param.fqn),
                                                     ": OPTIMIZER_KIND_MUON is not served over several nodes (got ",
                                                     plan.nodes(), ", want 1); use one node, or another kind"));
    }
  }
  return absl::OkStatus();
}

std::vector<int> RanksOfMatrices(const ShardPlan& plan, const std::vector<bool>& present) {
  struct Matrix {
    size_t param;
    double cost;
  };
  std::vector<int> ranks(plan.params.size(), -1);
  std::vector<Matrix> matrices;
  for (size_t p = 0; p < plan.params.size(); ++p) {
    const ParamPlan& param = plan.params[p];
    if (!present[p] || param.numel == 0 || !IsMatrix(plan, static_cast<int>(p))) continue;
    matrices.push_back({p, MuonCost(param.shape[0], param.shape[1], kUsualSteps)});
  }
  std::stable_sort(matrices.begin(), matrices.end(), [](const Matrix& a, const Matrix& b) { return a.cost > b.cost; });
  std::vector<double> loads(static_cast<size_t>(plan.world_size), 0.0);
  for (const Matrix& matrix : matrices) {
    const auto least = std::min_element(loads.begin(), loads.end());
    *least += matrix.cost;
    ranks[matrix.param] = static_cast<int>(std::distance(loads.begin(), least));
  }
  return ranks;
}

}  // namespace shardd
