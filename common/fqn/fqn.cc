#include "common/fqn/fqn.h"

#include "absl/strings/str_cat.h"

namespace shardd {
namespace {

bool IsWrapperComponent(absl::string_view component) {
  return component == "_fsdp_wrapped_module" || component == "_checkpoint_wrapped_module" || component == "_orig_mod" ||
         component == "_flat_param";
}

}  // namespace

std::string CleanFqn(absl::string_view name) {
  std::string clean;
  clean.reserve(name.size());
  // Not clean.empty(): a component may itself be empty, and ".module" must keep its second component.
  bool first = true;
  while (true) {
    const size_t dot = name.find('.');
    const absl::string_view component = name.substr(0, dot);
    // DDP's "module" is a prefix only; further down it is an ordinary name that users give.
    const bool drop = IsWrapperComponent(component) || (first && component == "module");
    if (!drop) {
      if (!first) {
        clean.push_back('.');
      }
      clean.append(component.data(), component.size());
      first = false;
    }
    if (dot == absl::string_view::npos) {
      return clean;
    }
    name.remove_prefix(dot + 1);
  }
}

std::string JoinFqn(absl::string_view prefix, absl::string_view name) {
  if (prefix.empty()) {
    return std::string(name);
  }
  if (name.empty()) {
    return std::string(prefix);
  }
  return absl::StrCat(prefix, ".", name);
}

}  // namespace shardd
