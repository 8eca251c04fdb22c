#ifndef SHARDD_SERVER_JOB_STEP_ASKED_STEPS_H_
#define SHARDD_SERVER_JOB_STEP_ASKED_STEPS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "shardd/v1/trainer.pb.h"

namespace shardd {

class Committed;

// The running step as ranks ask for it. Owns what each rank has sent with Step and, where the optimizer runs in the
// trainers, what it keeps with the step that it enters a pass with. Loop-confined.
class AskedSteps {
 public:
  // `committed` outlives this, and is read for errors.
  AskedSteps(int ranks, const Committed* committed) : committed_(committed), ranks_(ranks) {}

  // The rank has sent Step, whose commit has not come.
  bool stepped(int rank) const { return ranks_[rank].stepped; }
  bool any_stepped() const;
  // The first rank that has sent Step, or has not; -1: there is none.
  int First(bool stepped) const;
  const v1::Step& step(int rank) const { return ranks_[rank].step; }
  // The signal behind which the rank's device has done with the step; 0: it is done.
  uint64_t signal(int rank) const { return ranks_[rank].signal; }
  // FAILED_PRECONDITION: a rank's hyperparameters differ from rank 0's. REQUIRES: all ranks have stepped.
  absl::Status CheckEqual() const;

  void Ask(int rank, v1::Step step, uint64_t signal);
  // The rank's own optimizer has made the step, and keeps `state` with it.
  void AskInTrainer(int rank, std::string state);
  // The step is about to be committed. Returns what ranks keep with it, by rank; the next step begins.
  std::vector<std::string> TakeTrainerStates();
  // The same, while nothing is about to be committed.
  std::vector<std::string> TrainerStates() const;
  // The rank takes no part in this step any more.
  void Forget(int rank) { ranks_[rank] = OfRank(); }
  void EndEpoch() { ranks_.assign(ranks_.size(), OfRank()); }

 private:
  struct OfRank {
    bool stepped = false;
    v1::Step step;
    uint64_t signal = 0;
  };
  const Committed* const committed_;
  std::vector<OfRank> ranks_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_STEP_ASKED_STEPS_H_
