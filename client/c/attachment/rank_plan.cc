#include "client/c/attachment/rank_plan.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/shm/session_view.h"
#include "common/status/status_macros.h"

namespace shardd {

absl::Status RankPlan::Use(v1::JobSpec spec) {
  SHARDD_ASSIGN_OR_RETURN(plan_, PlanShards(spec, node_));
  spec_ = std::move(spec);
  layout_ = MakeSessionLayout(plan_);
  trainable_masks_.clear();
  for (const GroupPlan& group : plan_.groups) {
    std::vector<uint8_t> mask(static_cast<size_t>(MaskBytes(static_cast<int64_t>(group.params.size()))), 0);
    for (size_t i = 0; i < group.params.size(); ++i) {
      SetMaskBit(mask.data(), static_cast<int64_t>(i), param(group.params[i]).requires_grad);
    }
    trainable_masks_.push_back(std::move(mask));
  }
  return absl::OkStatus();
}

absl::Status RankPlan::CheckRank() const {
  return rank_ >= 0 && rank_ < plan_.world_size
             ? absl::OkStatus()
             : absl::InvalidArgumentError(absl::StrCat("attach job \"", job(), "\": rank is out of range (got ", rank_,
                                                       ", want 0 to ", plan_.world_size - 1, ")"));
}

}  // namespace shardd
