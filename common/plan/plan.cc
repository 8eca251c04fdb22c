#include "common/plan/plan.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/fqn/fqn.h"
#include "common/plan/config_internal.h"
#include "common/plan/digest_internal.h"
#include "common/plan/layout_internal.h"
#include "common/plan/policy_internal.h"
#include "common/plan/tree_internal.h"
#include "common/plan/whole_params.h"
#include "common/status/status_macros.h"

namespace shardd {
namespace {

using plan_internal::ManagedTree;
using plan_internal::Quoted;
using plan_internal::TiedUse;
using plan_internal::TreeParam;

constexpr absl::string_view kRootName = "(root)";

// Decides what happens to the group's parameters between forward and backward.
absl::Status DecideReshard(const ShardPlan& plan, const v1::Module& module, bool is_root, GroupPlan& group) {
  const int shards = plan.placement.shard_world_size;
  const int pieces = plan.placement.pieces(Purpose::kParameters);
  const int asked = module.post_forward_shard_size();
  const v1::Override override = module.reshard_after_forward();
  const auto error = [&](const auto&... fact) {
    return absl::InvalidArgumentError(
        absl::StrCat("plan group ", Quoted(group.name), ": post_forward_shard_size ", fact...));
  };
  if (asked < 0 || (asked > 0 && shards % asked != 0)) {
    return error("is no divisor of the shard group's size (got ", asked, ", shard group of ", shards, ")");
  }
  if (asked > 0 && override == (asked == 1 ? v1::OVERRIDE_YES : v1::OVERRIDE_NO)) {
    return error("contradicts reshard_after_forward (got ", asked, " with ", v1::Override_Name(override),
                 "); 1 means that the group is not resharded");
  }
  if (asked > 0) {
    group.reshard_after_forward = asked > 1;
  } else if (override != v1::OVERRIDE_UNSPECIFIED) {
    group.reshard_after_forward = override == v1::OVERRIDE_YES;
  } else {
    // Backward begins where forward ends, in the root: resharding its parameters would only fetch them again.
    group.reshard_after_forward = plan.placement.reshard_after_forward && !is_root;
  }
  group.post_forward_shard_size = !group.reshard_after_forward ? 1 : asked > 0 ? std::min(asked, pieces) : pieces;
  return absl::OkStatus();
}

// An override on a module that is not fully sharded would have no effect, which is not what its author expects.
absl::Status CheckModules(const v1::ModuleTree& tree, const std::vector<bool>& fully_sharded) {
  for (int m = 0; m < tree.modules_size(); ++m) {
    const v1::Module& module = tree.modules(m);
    const bool is_fully_sharded = fully_sharded[static_cast<size_t>(m)];
    const std::string where = absl::StrCat("plan module ", Quoted(module.name()), ": ");
    if (module.post_forward_shard_size() != 0 && !is_fully_sharded) {
      return absl::InvalidArgumentError(absl::StrCat(where,
                                                     "post_forward_shard_size is for fully sharded modules (got ",
                                                     module.post_forward_shard_size(), ", want 0)"));
    }
    if (module.has_mixed_precision() && !is_fully_sharded) {
      return absl::InvalidArgumentError(
          absl::StrCat(where, "mixed_precision is for fully sharded modules (got one, want none)"));
    }
    SHARDD_RETURN_IF_ERROR(plan_internal::CheckMixedPrecision(where, module.mixed_precision()));
  }
  return absl::OkStatus();
}

// Finds groups, parameters and their users, without layout.
class Grouper {
 public:
  Grouper(const v1::ModuleTree& tree, const ManagedTree& managed, const std::vector<bool>& fully_sharded,
          ShardPlan& plan)
      : tree_(tree), managed_(managed), plan_(plan), owner_(tree.modules_size(), -1) {
    for (int m = 0; m < tree.modules_size(); ++m) {
      if (managed.managed[m]) {
        owner_[m] = fully_sharded[m] ? m : owner_[tree.modules(m).parent()];
      }
    }
  }

  absl::Status Run() {
    SHARDD_RETURN_IF_ERROR(MakeGroups());
    SHARDD_RETURN_IF_ERROR(MakeParams());
    return MakeTies();
  }

 private:
  // A fully sharded module has a group if parameters are stored in it, or if it must ensure that another group, which
  // has its tied parameters, is unsharded.
  absl::Status MakeGroups() {
    const int modules = tree_.modules_size();
    std::vector<bool> has_group(modules, false);
    for (const TreeParam& param : managed_.params) {
      has_group[owner_[param.module]] = true;
    }
    for (const TiedUse& use : managed_.tied_uses) {
      has_group[owner_[use.module]] = true;
    }
    const auto groups = std::count(has_group.begin(), has_group.end(), true);
    plan_.groups.reserve(groups);
    plan_.group_by_name.reserve(groups);
    group_of_module_.assign(modules, -1);
    std::vector<int> groups_at(modules, 0);  // including modules above
    for (int m = 0; m < modules; ++m) {
      const int above = m == 0 ? 0 : groups_at[tree_.modules(m).parent()];
      groups_at[m] = above + (has_group[m] ? 1 : 0);
      if (!has_group[m]) {
        continue;
      }
      GroupPlan group;
      group.name = managed_.fqns[m].empty() ? std::string(kRootName) : managed_.fqns[m];
      group.module = m;
      group.depth = above;
      group.mixed_precision =
          tree_.modules(m).has_mixed_precision() ? tree_.modules(m).mixed_precision() : plan_.config.mixed_precision();
      SHARDD_RETURN_IF_ERROR(DecideReshard(plan_, tree_.modules(m), /*is_root=*/managed_.fqns[m].empty(), group));
      group_of_module_[m] = static_cast<int>(plan_.groups.size());
      if (!plan_.group_by_name.emplace(group.name, group_of_module_[m]).second) {
        return absl::InvalidArgumentError(
            absl::StrCat("plan group ", Quoted(group.name),
                         ": two fully sharded modules have this name without wrapper prefixes (the second is module ",
                         Quoted(tree_.modules(m).name()), "); shard only the outer one"));
      }
      plan_.groups.push_back(std::move(group));
    }
    return absl::OkStatus();
  }

  absl::Status MakeParams() {
    plan_.params.reserve(managed_.params.size());
    plan_.param_by_fqn.reserve(managed_.params.size() + managed_.tied_uses.size());
    for (const TreeParam& source : managed_.params) {
      ParamPlan param;
      param.fqn = source.fqn;
      param.shape.assign(source.declared->shape().begin(), source.declared->shape().end());
      param.numel = source.numel;
      param.dtype = source.declared->dtype();
      param.requires_grad = source.declared->requires_grad();
      param.group = group_of_module_[owner_[source.module]];
      param.optimizer_group = param.requires_grad ? 0 : -1;
      SHARDD_RETURN_IF_ERROR(AddName(param.fqn, static_cast<int>(plan_.params.size())));
      plan_.groups[param.group].params.push_back(static_cast<int>(plan_.params.size()));
      plan_.params.push_back(std::move(param));
    }
    return absl::OkStatus();
  }

  absl::Status MakeTies() {
    for (const TiedUse& use : managed_.tied_uses) {
      SHARDD_RETURN_IF_ERROR(AddName(use.fqn, use.param));
      plan_.params[use.param].aliases.push_back(use.fqn);
      const int user = group_of_module_[owner_[use.module]];
      const int holder = plan_.params[use.param].group;
      if (user != holder) {
        plan_.groups[user].also_unshards.push_back(holder);
      }
    }
    for (GroupPlan& group : plan_.groups) {
      std::vector<int>& others = group.also_unshards;
      std::sort(others.begin(), others.end());
      others.erase(std::unique(others.begin(), others.end()), others.end());
    }
    return absl::OkStatus();
  }

  absl::Status AddName(const std::string& fqn, int param) {
    if (!plan_.param_by_fqn.emplace(fqn, param).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("plan parameter ", Quoted(fqn), ": two parameters have this name without wrapper prefixes"));
    }
    return absl::OkStatus();
  }

  const v1::ModuleTree& tree_;
  const ManagedTree& managed_;
  ShardPlan& plan_;
  std::vector<int> owner_;            // by module: its nearest fully sharded module; -1: not managed
  std::vector<int> group_of_module_;  // by fully sharded module
};

absl::Status AssignOptimizerGroups(ShardPlan& plan) {
  std::vector<bool> is_listed(plan.params.size(), false);
  for (int g = 0; g < plan.config.optimizer().groups_size(); ++g) {
    for (const std::string& fqn : plan.config.optimizer().groups(g).fqns()) {
      const auto error = [&](absl::string_view fact) {
        return absl::InvalidArgumentError(
            absl::StrCat("plan optimizer group ", g + 1, ": parameter ", Quoted(fqn), " ", fact));
      };
      const int p = plan.FindParam(fqn);
      if (p < 0) {
        return error("is unknown or left out");
      }
      if (!plan.params[p].requires_grad) {
        return error("is frozen (got requires_grad false, want true)");
      }
      if (is_listed[p]) {
        return error(absl::StrCat("is listed twice (first in optimizer group ", plan.params[p].optimizer_group, ")"));
      }
      is_listed[p] = true;
      plan.params[p].optimizer_group = g + 1;
    }
  }
  return absl::OkStatus();
}

// The daemon's optimizers compute in fp32.
absl::Status CheckTrained(const ShardPlan& plan) {
  const v1::OptimizerKind kind = plan.config.optimizer().kind();
  for (const ParamPlan& param : plan.params) {
    if (param.requires_grad && !IsTrainable(param.dtype) && kind != v1::OPTIMIZER_KIND_TRAINER) {
      return absl::InvalidArgumentError(absl::StrCat("plan parameter ", Quoted(param.fqn), ": ", DTypeName(param.dtype),
                                                     " is trained by optimizers in the trainers ", "only (got ",
                                                     v1::OptimizerKind_Name(kind),
                                                     ", want OPTIMIZER_KIND_TRAINER); use one of the framework's, or "
                                                     "convert the parameter to float32"));
    }
  }
  return absl::OkStatus();
}

// Float8 is for what nodes gather from each other, and for dtypes that have its values.
absl::Status CheckFloat8Gathers(const ShardPlan& plan) {
  for (const GroupPlan& group : plan.groups) {
    if (!group.mixed_precision.float8_gathers()) continue;
    if (!plan.cut_over_nodes) {
      return absl::UnimplementedError(absl::StrCat(
          "plan group ", Quoted(group.name), ": mixed_precision.float8_gathers: no parameters cross nodes, and a job ",
          "must not lose precision for nothing (got ", v1::Strategy_Name(plan.config.strategy()), " on ", plan.nodes(),
          plan.nodes() == 1 ? " node" : " nodes, each with whole copies",
          ", want parameters cut over several nodes: STRATEGY_FULL_SHARD, STRATEGY_SHARD_GRAD_OP or shard groups that "
          "span nodes); leave float8_gathers false"));
    }
    for (const int p : group.params) {
      const DType dtype = plan.params[static_cast<size_t>(p)].dtype;
      if (dtype == v1::DTYPE_FLOAT64 && group.mixed_precision.param_dtype() == v1::DTYPE_UNSPECIFIED) {
        return absl::UnimplementedError(
            absl::StrCat("plan group ", Quoted(group.name), ": mixed_precision.float8_gathers: parameter ",
                         Quoted(plan.params[static_cast<size_t>(p)].fqn),
                         " is read in another dtype than float8 has values for (got float64, want float32, bfloat16 or "
                         "float16); set param_dtype, or leave float8_gathers false for its module"));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ShardPlan> PlanShards(const v1::JobSpec& spec, int node) {
  SHARDD_RETURN_IF_ERROR(plan_internal::CheckJobName(spec.name()));
  if (spec.world_size() < 1 || spec.world_size() > kMaxWorldSize) {
    return absl::InvalidArgumentError(absl::StrCat("plan job ", Quoted(spec.name()),
                                                   ": world size is out of range (got ", spec.world_size(),
                                                   ", want 1 to ", kMaxWorldSize, ")"));
  }
  ShardPlan plan;
  plan.world_size = spec.world_size();
  SHARDD_ASSIGN_OR_RETURN(plan.config, plan_internal::FillConfig(spec.config(), spec.world_size()));
  plan.snapshots_by_cost = spec.config().keep_every() == 0 &&
                           plan.config.optimizer().kind() == v1::OPTIMIZER_KIND_TRAINER && plan.nodes() == 1;
  if (node < 0 || node >= plan.nodes()) {
    return absl::InvalidArgumentError(absl::StrCat("plan job ", Quoted(spec.name()), ": no such node (got ", node,
                                                   ", want 0 <= node < ", plan.nodes(), ")"));
  }
  const int row = plan_internal::NodesOfRow(plan.config, plan.world_size);
  plan.cut_over_nodes = row > 1;
  plan.node = node % row;
  plan.placement = MakePlacement(plan.config, row * plan.world_size);

  SHARDD_ASSIGN_OR_RETURN(const ManagedTree managed, plan_internal::ReadTree(spec.tree()));
  SHARDD_ASSIGN_OR_RETURN(const std::vector<bool> fully_sharded,
                          plan_internal::FindFullyShardedModules(spec.tree(), managed, spec.policy()));
  SHARDD_RETURN_IF_ERROR(CheckModules(spec.tree(), fully_sharded));
  SHARDD_RETURN_IF_ERROR(Grouper(spec.tree(), managed, fully_sharded, plan).Run());
  SHARDD_RETURN_IF_ERROR(AssignOptimizerGroups(plan));
  SHARDD_RETURN_IF_ERROR(CheckTrained(plan));
  SHARDD_RETURN_IF_ERROR(CheckFloat8Gathers(plan));
  SHARDD_RETURN_IF_ERROR(CheckWholeParams(plan));
  PlaceWholeParams(plan);
  plan_internal::LayOutFlatParams(plan);
  SHARDD_RETURN_IF_ERROR(plan_internal::LayOutMemory(plan));
  SHARDD_ASSIGN_OR_RETURN(plan.digest, plan_internal::PlanDigest(plan));
  return plan;
}

int ShardPlan::FindParam(absl::string_view fqn) const {
  // Names in the map are clean, so a name that is found needs no cleaning.
  auto found = param_by_fqn.find(fqn);
  if (found == param_by_fqn.end()) {
    found = param_by_fqn.find(CleanFqn(fqn));
  }
  return found == param_by_fqn.end() ? -1 : found->second;
}

int ShardPlan::FindGroup(absl::string_view name) const {
  auto found = group_by_name.find(name);
  if (found == group_by_name.end()) {
    const std::string clean = CleanFqn(name);
    found = group_by_name.find(clean.empty() ? kRootName : absl::string_view(clean));
  }
  return found == group_by_name.end() ? -1 : found->second;
}

absl::StatusOr<ShardMetadata> GetShardMetadata(const ShardPlan& plan, int flat_param, int rank) {
  if (flat_param < 0 || flat_param >= static_cast<int>(plan.flat_params.size())) {
    return absl::InvalidArgumentError(absl::StrCat("shard metadata: no such flat parameter (got ", flat_param,
                                                   ", want 0 <= flat parameter < ", plan.flat_params.size(), ")"));
  }
  if (rank < 0 || rank >= plan.world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("shard metadata: no such rank (got ", rank, ", want 0 <= rank < ", plan.world_size, ")"));
  }
  ShardMetadata metadata;
  int64_t numel = 0;
  for (const Segment& segment : RankSegments(plan, flat_param, rank)) {
    metadata.pieces.push_back({segment.param, segment.offset - plan.params[segment.param].offset, segment.numel});
    numel += segment.numel;
  }
  // DIM0: a shard consists of whole rows of parameters. With whole matrices it is no range of the flat parameter.
  if (plan.config.layout() == v1::LAYOUT_FLAT && !plan_internal::HasWhole(plan, plan.flat_params[flat_param])) {
    metadata.padding_numel = plan.flat_params[flat_param].shard_numel - numel;
  }
  return metadata;
}

}  // namespace shardd
