#include "common/plan/extend.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "common/plan/tree_internal.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

// Marks as trained everything that `plan` trains, also under tied names.
absl::Status TrainWhatIsTrainedIn(const ShardPlan& plan, v1::ModuleTree* tree) {
  SHARDD_ASSIGN_OR_RETURN(const plan_internal::ManagedTree managed, plan_internal::ReadTree(*tree));
  absl::flat_hash_set<const v1::Parameter*> trained;
  absl::flat_hash_set<uint64_t> storages;  // tied
  for (const plan_internal::TreeParam& param : managed.params) {
    const int index = plan.FindParam(param.fqn);
    if (index >= 0 && plan.params[index].requires_grad) {
      trained.insert(param.declared);
      storages.insert(param.declared->storage_id());
    }
  }
  storages.erase(0);
  for (v1::Module& module : *tree->mutable_modules()) {
    for (v1::Parameter& param : *module.mutable_parameters()) {
      if (trained.contains(&param) || storages.contains(param.storage_id())) {
        param.set_requires_grad(true);
      }
    }
  }
  return absl::OkStatus();
}

std::string WhatIsNew(const ShardPlan& now, const ShardPlan& before) {
  std::string first;
  int more = 0;
  for (const ParamPlan& param : now.params) {
    const int index = before.FindParam(param.fqn);
    if (param.requires_grad && index >= 0 && !before.params[index].requires_grad) {
      more += first.empty() ? 0 : 1;
      first = first.empty() ? param.fqn : first;
    }
  }
  if (first.empty()) {
    return now.digest == before.digest ? "" : "optimizer groups";
  }
  return absl::StrCat("parameter ", plan_internal::Quoted(first),
                      more > 0 ? absl::StrCat(" (and ", more, " more)") : "");
}

}  // namespace

absl::StatusOr<v1::JobSpec> Widened(const v1::JobSpec& asked, const v1::JobSpec& job, const ShardPlan& plan,
                                    bool own_groups) {
  v1::JobSpec spec = asked;
  SHARDD_RETURN_IF_ERROR(TrainWhatIsTrainedIn(plan, spec.mutable_tree()));
  if (spec.config().optimizer().kind() != job.config().optimizer().kind()) {
    return spec;
  }
  v1::OptimizerConfig& optimizer = *spec.mutable_config()->mutable_optimizer();
  optimizer.set_trainer_states(std::max(optimizer.trainer_states(), job.config().optimizer().trainer_states()));
  if (!own_groups) {
    *optimizer.mutable_groups() = job.config().optimizer().groups();
  }
  return spec;
}

absl::StatusOr<Extension> Extend(const v1::JobSpec& asked, const v1::JobSpec& job, const ShardPlan& plan) {
  Extension result;
  SHARDD_ASSIGN_OR_RETURN(result.spec, Widened(asked, job, plan, /*own_groups=*/true));
  SHARDD_ASSIGN_OR_RETURN(result.plan, PlanShards(result.spec));
  // The job's own spec, widened the same way: a remaining difference is one that Extend does not allow.
  SHARDD_ASSIGN_OR_RETURN(v1::JobSpec same, Widened(job, result.spec, result.plan, /*own_groups=*/false));
  if (const std::string difference = FirstDifference(result.spec, same); !difference.empty()) {
    return absl::FailedPreconditionError(difference);
  }
  result.what = WhatIsNew(result.plan, plan);
  return result;
}

}  // namespace shardd
