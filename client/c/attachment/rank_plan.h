#ifndef SHARDD_CLIENT_C_ATTACHMENT_RANK_PLAN_H_
#define SHARDD_CLIENT_C_ATTACHMENT_RANK_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/plan/plan.h"
#include "common/plan/session_layout.h"
#include "shardd/v1/trainer.pb.h"

namespace shardd {

// Owns what is constant in a job for one of its ranks: the spec, the plan that follows from it and the layout of a
// session's memory. Immutable once the rank is attached. REQUIRES: indices are within the plan.
class RankPlan {
 public:
  RankPlan(int rank, int node) : rank_(rank), node_(node) {}
  RankPlan(const RankPlan&) = delete;
  RankPlan& operator=(const RankPlan&) = delete;

  // Plans `spec` and replaces the former one. Changes nothing if PlanShards fails.
  absl::Status Use(v1::JobSpec spec);
  // Returns INVALID_ARGUMENT if the job has no such rank.
  absl::Status CheckRank() const;

  int rank() const { return rank_; }
  int node() const { return node_; }
  const v1::JobSpec& spec() const { return spec_; }
  const std::string& job() const { return spec_.name(); }
  const ShardPlan& plan() const { return plan_; }
  const SessionLayout& layout() const { return layout_; }

  size_t groups() const { return plan_.groups.size(); }
  const GroupPlan& group(int index) const { return plan_.groups[static_cast<size_t>(index)]; }
  const std::string& group_name(int index) const { return group(index).name; }
  const ParamPlan& param(int index) const { return plan_.params[static_cast<size_t>(index)]; }
  const FlatParamPlan& flat_of(const ParamPlan& param) const {
    return plan_.flat_params[static_cast<size_t>(param.flat_param)];
  }
  // Returns a mask with one bit per parameter of the group: set if it has gradients.
  const std::vector<uint8_t>& trainable_mask(int group) const { return trainable_masks_[static_cast<size_t>(group)]; }

  bool pooled() const { return plan_.config.unshard_mode() == v1::UNSHARD_MODE_POOLED; }
  bool pass_copies() const { return plan_.config.pass_copies(); }
  bool trainers_write() const { return !plan_.config.trainers_never_write(); }
  bool writes_edits_back() const { return plan_.writes_edits_back(); }
  bool trainers_optimize() const { return plan_.config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER; }
  // Returns which of the `copies` in a slab is this rank's.
  int64_t copy_of(int copies) const {
    return copies > 1 ? plan_.placement.replica_index[static_cast<size_t>(rank_)] : 0;
  }

 private:
  const int rank_;
  const int node_;  // of the spec's nodes
  v1::JobSpec spec_;
  ShardPlan plan_;
  SessionLayout layout_;
  std::vector<std::vector<uint8_t>> trainable_masks_;  // by group
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_C_ATTACHMENT_RANK_PLAN_H_
