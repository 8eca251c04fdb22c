#include <algorithm>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/fqn/fqn.h"
#include "common/plan/policy_internal.h"
#include "common/status/status_macros.h"

namespace shardd::plan_internal {
namespace {

// "any of" is a union, so any nesting reduces to one policy of each kind.
struct MergedPolicy {
  absl::flat_hash_set<std::string> class_names;
  absl::flat_hash_set<std::string> fqns;  // clean
  bool always = false;
  bool has_min_numel = false;
  int64_t min_numel = 0;
};

absl::StatusOr<MergedPolicy> Merge(const v1::Policy& policy) {
  MergedPolicy merged;
  // A stack, not recursion: the sender controls the nesting.
  std::vector<const v1::Policy*> pending = {&policy};
  while (!pending.empty()) {
    const v1::Policy& next = *pending.back();
    pending.pop_back();
    switch (next.kind_case()) {
      case v1::Policy::kClasses:
        merged.class_names.insert(next.classes().class_names().begin(), next.classes().class_names().end());
        break;
      case v1::Policy::kMinNumel: {
        const int64_t numel = next.min_numel().min_numel();
        if (numel < 0) {
          return absl::InvalidArgumentError(
              absl::StrCat("plan policy min_numel: out of range (got ", numel, ", want >= 0)"));
        }
        merged.min_numel = merged.has_min_numel ? std::min(merged.min_numel, numel) : numel;
        merged.has_min_numel = true;
        break;
      }
      case v1::Policy::kAlways:
        merged.always = true;
        break;
      case v1::Policy::kFqns:
        for (const std::string& fqn : next.fqns().fqns()) {
          merged.fqns.insert(fqn == "(root)" ? "" : CleanFqn(fqn));
        }
        break;
      case v1::Policy::kAnyOf:
        for (const v1::Policy& inner : next.any_of().policies()) {
          pending.push_back(&inner);
        }
        break;
      case v1::Policy::KIND_NOT_SET:
        break;
    }
  }
  return merged;
}

bool IsContainer(absl::string_view class_name) {
  const size_t separator = class_name.find_last_of(".:");  // "torch.nn.ModuleList", "torch::nn::ModuleListImpl"
  absl::string_view base = separator == absl::string_view::npos ? class_name : class_name.substr(separator + 1);
  base = absl::StripSuffix(base, "Impl");
  return base == "ModuleList" || base == "ModuleDict" || base == "ParameterList" || base == "ParameterDict";
}

// A wrapper and its module share a clean name; the outermost is marked (sharding goes outside of checkpointing).
absl::Status MarkByFqn(const ManagedTree& managed, const absl::flat_hash_set<std::string>& fqns,
                       std::vector<bool>& fully_sharded) {
  absl::flat_hash_set<std::string> missing = fqns;
  for (size_t m = 0; m < managed.fqns.size() && !missing.empty(); ++m) {
    if (managed.managed[m] && missing.erase(managed.fqns[m]) > 0) {
      fully_sharded[m] = true;
    }
  }
  if (missing.empty()) {
    return absl::OkStatus();
  }
  const std::string& first = *std::min_element(missing.begin(), missing.end());
  return absl::InvalidArgumentError(absl::StrCat("plan policy fqns: no such module, or it is left out (got ",
                                                 Quoted(first), ", want the name of a managed module)"));
}

}  // namespace

absl::StatusOr<std::vector<bool>> FindFullyShardedModules(const v1::ModuleTree& tree, const ManagedTree& managed,
                                                          const v1::Policy& policy) {
  const int modules = tree.modules_size();
  SHARDD_ASSIGN_OR_RETURN(const MergedPolicy merged, Merge(policy));
  std::vector<bool> fully_sharded(modules, false);
  SHARDD_RETURN_IF_ERROR(MarkByFqn(managed, merged.fqns, fully_sharded));

  std::vector<int64_t> unassigned_numel(modules, 0);
  for (const TreeParam& param : managed.params) {
    unassigned_numel[param.module] += param.numel;
  }
  // Reverse pre-order visits children before their parents, so that a parent counts only what they left.
  for (int m = modules - 1; m >= 0; --m) {
    if (!managed.managed[m]) {
      continue;
    }
    const v1::Module& module = tree.modules(m);
    const bool by_size =
        merged.always || (merged.has_min_numel && unassigned_numel[m] > 0 && unassigned_numel[m] >= merged.min_numel);
    if (m == 0 || module.mark() == v1::MODULE_MARK_FULLY_SHARD || merged.class_names.contains(module.class_name()) ||
        (by_size && !IsContainer(module.class_name()))) {
      fully_sharded[m] = true;
    }
    if (!fully_sharded[m]) {
      unassigned_numel[module.parent()] += unassigned_numel[m];
    }
  }
  return fully_sharded;
}

}  // namespace shardd::plan_internal
