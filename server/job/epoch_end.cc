#include "server/job/epoch_end.h"

#include <utility>

#include "server/job/nodes/job_nodes.h"
#include "server/job/step/commits.h"

namespace shardd {

bool EpochEnd::MayBegin() const { return commits_->MayEndEpoch() && !nodes_->promised(); }

void EpochEnd::Await(Pending end) {
  if (!pending_.has_value()) {
    pending_ = std::move(end);
    return;
  }
  pending_->lost_ranks.insert(pending_->lost_ranks.end(), end.lost_ranks.begin(), end.lost_ranks.end());
}

void EpochEnd::StepCommitted() {
  if (behind_step_.has_value() && behind_step_->second()) {
    Await({std::exchange(behind_step_, std::nullopt)->first, {}});
    pending_->behind_commit = true;  // whatever the cause
  }
}

EpochEnd::Pending EpochEnd::Take() { return *std::exchange(pending_, std::nullopt); }

EpochEnd::Pending EpochEnd::TakeOr(absl::Status cause) {
  return pending() && !commits_->decision().committing() ? Take() : Pending{std::move(cause), {}};
}

}  // namespace shardd
