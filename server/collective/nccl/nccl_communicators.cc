#include "server/collective/nccl/nccl_communicators.h"

#include "absl/strings/str_cat.h"
#include "common/status/status_macros.h"

namespace shardd {

absl::StatusOr<std::shared_ptr<NcclCommunicator>> NcclCommunicators::For(int ranks) {
  if (ranks < 2) return absl::FailedPreconditionError("one rank has nobody to sum with");
  if (static_cast<size_t>(ranks) > ordinals_.size()) {
    return absl::FailedPreconditionError(
        absl::StrCat("NCCL wants a GPU for each rank (got ", ranks, " ranks on ", ordinals_.size(), " GPUs)"));
  }
  const std::vector<int> of_ranks(ordinals_.begin(), ordinals_.begin() + ranks);
  NcclCommunicator::Options options;
  options.takes_window = windows_;
  if (windows_) return NcclCommunicator::Create(library_, driver_, of_ranks, options);
  absl::MutexLock lock(&mutex_);
  std::shared_ptr<NcclCommunicator>& made = by_ranks_[ranks];
  if (made == nullptr || !made->broken().ok()) {
    made = nullptr;
    SHARDD_ASSIGN_OR_RETURN(made, NcclCommunicator::Create(library_, driver_, of_ranks, options));
  }
  return made;
}

}  // namespace shardd
