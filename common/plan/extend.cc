#include "common/plan/extend.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "common/plan/optimizer_kinds.h"
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

// Whether every parameter in a group of `asked` has the same optimizer in `job`: what differs there is no widening.
bool SameOptimizersOf(const v1::OptimizerConfig& asked, const v1::OptimizerConfig& job) {
  if (HasSeveralOptimizers(asked) != HasSeveralOptimizers(job)) {
    return false;
  }
  absl::flat_hash_map<absl::string_view, const v1::OptimizerConfig::Group*> of_job;
  for (const v1::OptimizerConfig::Group& group : job.groups()) {
    for (const std::string& fqn : group.fqns()) of_job.emplace(fqn, &group);
  }
  for (const v1::OptimizerConfig::Group& group : asked.groups()) {
    for (const std::string& fqn : group.fqns()) {
      const auto it = of_job.find(fqn);
      if (it != of_job.end() && (it->second->kind() != group.kind() || it->second->momentum() != group.momentum())) {
        return false;
      }
    }
  }
  return true;
}

// Sets `what` and `trains_more`.
void NameWhatIsNew(const ShardPlan& before, Extension* extension) {
  const ShardPlan& now = extension->plan;
  std::string first;
  int more = 0;
  for (const ParamPlan& param : now.params) {
    const int index = before.FindParam(param.fqn);
    if (param.requires_grad && index >= 0 && !before.params[index].requires_grad) {
      more += first.empty() ? 0 : 1;
      first = first.empty() ? param.fqn : first;
    }
  }
  extension->trains_more = !first.empty();
  if (extension->trains_more) {
    extension->what = absl::StrCat("parameter ", plan_internal::Quoted(first),
                                   more > 0 ? absl::StrCat(" (and ", more, " more)") : "");
  } else if (now.digest != before.digest) {
    extension->what = "optimizer groups";
  }
}

// The bytes of a parameter's state are copied as they are.
absl::Status CheckKindsStay(const ShardPlan& now, const ShardPlan& before) {
  const v1::OptimizerConfig& to = now.config.optimizer();
  const v1::OptimizerConfig& from = before.config.optimizer();
  for (const ParamPlan& param : now.params) {
    const int index = before.FindParam(param.fqn);
    const int group = index < 0 ? -1 : before.params[index].optimizer_group;
    const bool had_none = group == 0 && HasSeveralOptimizers(from);
    if (group < 0 || had_none || param.optimizer_group < 0) continue;
    const auto text = [](const v1::OptimizerConfig& config, int of) {
      return of == 0 && HasSeveralOptimizers(config) ? "no optimizer"
                                                     : absl::StrCat(OptimizerKindText(OptimizerKindOf(config, of)),
                                                                    HasMomentum(config, of) ? " with momentum" : "");
    };
    if (const std::string got = text(to, param.optimizer_group), want = text(from, group); got != want) {
      return absl::FailedPreconditionError(absl::StrCat("parameter ", plan_internal::Quoted(param.fqn),
                                                        ": optimizer differs (got ", got, ", want ", want, ")"));
    }
  }
  return absl::OkStatus();
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
  if (!own_groups && SameOptimizersOf(optimizer, job.config().optimizer())) {
    *optimizer.mutable_groups() = job.config().optimizer().groups();
  }
  return spec;
}

absl::StatusOr<Extension> Extend(const v1::JobSpec& asked, const v1::JobSpec& job, const ShardPlan& plan) {
  Extension result;
  SHARDD_ASSIGN_OR_RETURN(result.spec, Widened(asked, job, plan, /*own_groups=*/true));
  SHARDD_ASSIGN_OR_RETURN(result.plan, PlanShards(result.spec, plan.node));
  // The job's own spec, widened the same way: a remaining difference is one that Extend does not allow.
  SHARDD_ASSIGN_OR_RETURN(v1::JobSpec same, Widened(job, result.spec, result.plan, /*own_groups=*/false));
  if (const std::string difference = FirstDifference(result.spec, same); !difference.empty()) {
    return absl::FailedPreconditionError(difference);
  }
  SHARDD_RETURN_IF_ERROR(CheckKindsStay(result.plan, plan));
  NameWhatIsNew(plan, &result);
  return result;
}

absl::StatusOr<bool> DescribesEarlier(const v1::JobSpec& asked, const ShardPlan& plan) {
  SHARDD_ASSIGN_OR_RETURN(const ShardPlan planned, PlanShards(asked, plan.node));
  return std::all_of(planned.params.begin(), planned.params.end(), [&plan](const ParamPlan& param) {
    const int index = plan.FindParam(param.fqn);
    return !param.requires_grad || (index >= 0 && plan.params[index].requires_grad &&
                                    plan.params[index].optimizer_group == param.optimizer_group);
  });
}

}  // namespace shardd
