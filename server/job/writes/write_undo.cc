#include "server/job/writes/write_undo.h"

namespace shardd {

bool WriteUndo::BeginCommit() {
  counts_.clear();
  return std::exchange(saves_, std::nullopt).has_value();
}

std::optional<uint64_t> WriteUndo::BeginUndo(std::vector<int64_t>* update_counts) {
  for (const auto& [param, count] : counts_) {
    (*update_counts)[param] = count;
  }
  counts_.clear();
  undoing_ = undoing_ || saves_.has_value();  // another epoch may end before the first one's old bytes are back
  return std::exchange(saves_, std::nullopt);
}

}  // namespace shardd
