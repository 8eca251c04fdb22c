#include "server/job/step/asked_steps.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/job/step/committed.h"
#include "server/optimizer/step_difference.h"

namespace shardd {

bool AskedSteps::any_stepped() const { return First(/*stepped=*/true) >= 0; }

int AskedSteps::First(bool stepped) const {
  const auto it =
      std::find_if(ranks_.begin(), ranks_.end(), [stepped](const OfRank& rank) { return rank.stepped == stepped; });
  return it == ranks_.end() ? -1 : static_cast<int>(it - ranks_.begin());
}

absl::Status AskedSteps::CheckEqual() const {
  for (size_t rank = 1; rank < ranks_.size(); ++rank) {
    const std::string difference = StepDifference(ranks_[rank].step, ranks_[0].step);
    if (!difference.empty()) {
      return committed_->RankError(
          absl::StatusCode::kFailedPrecondition, static_cast<int>(rank), "Step",
          absl::StrCat("hyperparameters of rank ", rank, " differ from rank 0's: ", difference));
    }
  }
  return absl::OkStatus();
}

void AskedSteps::Ask(int rank, v1::Step step, uint64_t signal) {
  ranks_[rank].stepped = true;
  ranks_[rank].signal = signal;
  ranks_[rank].step = std::move(step);
}

void AskedSteps::AskInTrainer(int rank, std::string state) {
  ranks_[rank].step.Clear();
  ranks_[rank].step.set_trainer_state(std::move(state));
}

std::vector<std::string> AskedSteps::TakeTrainerStates() {
  std::vector<std::string> states;
  for (OfRank& rank : ranks_) {
    states.push_back(std::move(*rank.step.mutable_trainer_state()));
    rank.stepped = false;
    rank.signal = 0;
    rank.step.Clear();
  }
  return states;
}

std::vector<std::string> AskedSteps::TrainerStates() const {
  std::vector<std::string> states;
  for (const OfRank& rank : ranks_) states.push_back(rank.step.trainer_state());
  return states;
}

}  // namespace shardd
