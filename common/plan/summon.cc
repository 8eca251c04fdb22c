#include "common/plan/summon.h"

#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace shardd {
namespace {

// The innermost fully sharded module around a parameter: the longest group name that is a prefix of its name.
int GroupAround(const ShardPlan& plan, absl::string_view fqn) {
  int around = -1;
  size_t longest = 0;
  for (size_t g = 0; g < plan.groups.size(); ++g) {
    const std::string& name = plan.groups[g].name;
    const bool is_root = name == "(root)";
    if (is_root || absl::StartsWith(fqn, absl::StrCat(name, "."))) {
      const size_t length = is_root ? 0 : name.size();
      if (around < 0 || length >= longest) {
        around = static_cast<int>(g);
        longest = length;
      }
    }
  }
  return around;
}

}  // namespace

std::vector<bool> SummonedParams(const v1::JobSpec& spec, const ShardPlan& plan, int group, bool recurse) {
  if (group < 0) {
    return std::vector<bool>(plan.params.size(), true);
  }
  const int top = plan.groups[group].module;
  std::vector<bool> groups(plan.groups.size(), false);
  for (size_t g = 0; g < plan.groups.size(); ++g) {
    int module = plan.groups[g].module;
    while (recurse && module != top && module >= 0) {
      module = spec.tree().modules(module).parent();
    }
    groups[g] = module == top;
  }
  std::vector<bool> params(plan.params.size(), false);
  for (size_t p = 0; p < plan.params.size(); ++p) {
    params[p] = groups[plan.params[p].group];
    for (const std::string& alias : plan.params[p].aliases) {
      const int around = GroupAround(plan, alias);
      params[p] = params[p] || (around >= 0 && groups[around]);
    }
  }
  return params;
}

}  // namespace shardd
