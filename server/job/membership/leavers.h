#ifndef SHARDD_SERVER_JOB_MEMBERSHIP_LEAVERS_H_
#define SHARDD_SERVER_JOB_MEMBERSHIP_LEAVERS_H_

// Ranks that say good-bye. A rank may detach before its step is committed, or before others have closed backwards that
// they need its gradients for: its session stays until then. A rank that has said that it needs the job no more has
// finished, and takes part in nothing until it attaches again.
//
//   rank:  here --Defer--> leaving --Left(finished)--> finished --Came--> here
//               \----------------------Left------------/

#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/job/job_part.h"

namespace shardd {

class AskedSteps;
class Committed;
class FullParams;
class HandIns;
class Pairing;
class Passes;
class Sessions;
class ValueCommit;

// Owns which ranks have finished, and which are leaving. Reads what ranks are in the middle of. Loop-confined.
class Leavers final : public JobPart {
 public:
  // What a rank may be in the middle of. All outlive the leavers.
  struct Facts {
    const Committed* committed;
    const Sessions* sessions;
    const AskedSteps* steps;
    const Pairing* pairing;
    const Passes* passes;
    const HandIns* hand_ins;
    const FullParams* full_params;
    const ValueCommit* value_commit;
  };
  Leavers(int ranks, Facts facts) : see_(facts), ranks_(ranks) {}

  bool finished(int rank) const { return ranks_[rank].finished; }
  bool all_finished() const;
  // The rank has detached, and its session stays for its step or its gradients.
  bool leaving(int rank) const { return ranks_[rank].leaving.has_value(); }
  // ... and it needs the job no more.
  bool leaving_finished(int rank) const { return ranks_[rank].leaving == true; }

  // The rank leaves in the middle of a step, but with whole backwards, and nobody waits for anything else of it.
  bool LeavesInOrder(int rank) const;
  // Its session has to stay for gradients. `sums_under_way`: gradients are being added.
  bool OthersNeedGradientsOf(int rank, bool sums_under_way) const;
  // A leaving rank that may go now; -1: there is none.
  int MayGo(bool sums_under_way) const;
  // Some rank other than readers is in the middle of what all ranks do together.
  bool AnyMidway() const;
  // FAILED_PRECONDITION: a rank other than `rank` has finished that `what` needs, in this backward if it is one.
  absl::Status CheckNobodyFinished(int rank, absl::string_view what, int backward) const;

  void Defer(int rank, bool finished) { ranks_[rank].leaving = finished; }
  // The rank was leaving, and goes now. Returns whether it has finished. REQUIRES: leaving(rank).
  bool Take(int rank) { return *std::exchange(ranks_[rank].leaving, std::nullopt); }
  void Left(int rank, bool finished) { ranks_[rank] = {finished, std::nullopt}; }
  void Came(int rank) { ranks_[rank].finished = false; }
  // Who was leaving is gone with its session; who has finished has.
  void EndEpoch() override;

 private:
  struct OfRank {
    bool finished = false;
    std::optional<bool> leaving;  // its value: it has finished
  };
  int count() const { return static_cast<int>(ranks_.size()); }

  const Facts see_;
  std::vector<OfRank> ranks_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_JOB_MEMBERSHIP_LEAVERS_H_
