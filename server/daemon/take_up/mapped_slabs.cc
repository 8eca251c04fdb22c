#include "server/daemon/take_up/mapped_slabs.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/shm/open_files.h"
#include "common/status/status_macros.h"

namespace shardd {

absl::StatusOr<MappedSlabs> MapSlabs(const ShardPlan& plan, const JobMemory::Kept& kept, bool snapshot) {
  const std::pair<const char*, int64_t> wanted[] = {{"shards", plan.memory.shards_bytes},
                                                    {"parameters", plan.memory.parameters_bytes},
                                                    {"gradients", plan.memory.gradients_bytes},
                                                    {"optimizer", plan.memory.optimizer_bytes},
                                                    {"snapshot", snapshot ? plan.memory.kept_bytes : 0}};
  MappedSlabs mapped;
  for (const auto& [name, size_bytes] : wanted) {
    if (size_bytes == 0) continue;
    const auto it = kept.find(name);
    if (it == kept.end()) {
      return absl::DataLossError(
          absl::StrCat("its \"", name, "\" is not there: the custodian or the daemon ended while it was handed over"));
    }
    SHARDD_ASSIGN_OR_RETURN(UniqueFd copy, Duplicate(name, it->second.get()));
    SHARDD_ASSIGN_OR_RETURN(mapped.by_name[name], Slab::TakeUp(name, std::move(copy), size_bytes));
  }
  return mapped;
}

}  // namespace shardd
