#include "client/c/attachment/handle_set.h"

#include "common/status/status_macros.h"

namespace shardd {

absl::Status HandleSet::ApplyWithTied(int group, HandleEvent event) {
  const std::vector<int>& tied = plan_.group(group).also_unshards;
  if (tied.empty()) {
    return Apply(group, event);
  }
  // All or nothing: tried on copies first.
  Handle trial = of(group);
  SHARDD_RETURN_IF_ERROR(trial.Apply(event, plan_.group_name(group), plan_.rank()));
  for (const int other : tied) {
    Handle copy = of(other);
    SHARDD_RETURN_IF_ERROR(copy.Apply(event, plan_.group_name(other), plan_.rank()));
  }
  handles_[static_cast<size_t>(group)] = trial;
  for (const int other : tied) {
    (void)Apply(other, event);
  }
  return absl::OkStatus();
}

absl::Status HandleSet::ApplyToAll(HandleEvent event) {
  std::vector<Handle> trial = handles_;
  for (size_t i = 0; i < trial.size(); ++i) {
    SHARDD_RETURN_IF_ERROR(trial[i].Apply(event, plan_.plan().groups[i].name, plan_.rank()));
  }
  handles_ = std::move(trial);
  return absl::OkStatus();
}

}  // namespace shardd
