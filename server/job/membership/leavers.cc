#include "server/job/membership/leavers.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/job/full_params/full_params.h"
#include "server/job/gradients/pairing.h"
#include "server/job/membership/sessions.h"
#include "server/job/step/asked_steps.h"
#include "server/job/step/committed.h"
#include "server/job/writes/hand_ins.h"
#include "server/job/writes/passes.h"
#include "server/job/writes/value_commit.h"

namespace shardd {

bool Leavers::all_finished() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const OfRank& rank) { return rank.finished; });
}

bool Leavers::LeavesInOrder(int rank) const {
  if (see_.pairing->closed(rank) == 0 || !see_.passes->outside(rank) || see_.hand_ins->open(rank) ||
      see_.hand_ins->wants(rank)) {
    return false;
  }
  // Of backwards that it has not closed, nobody has begun one: not the rank, nor another that would wait for it.
  if (see_.pairing->SomeGaveFrom(see_.pairing->closed(rank))) {
    return false;
  }
  for (int other = 0; other < count(); ++other) {
    if (see_.steps->stepped(other) || see_.hand_ins->open(other) || see_.passes->entering(other) ||
        see_.value_commit->asked(other) || see_.full_params->asked(other)) {
      return false;
    }
  }
  return true;
}

bool Leavers::OthersNeedGradientsOf(int rank, bool sums_under_way) const {
  if (sums_under_way || see_.pairing->AwaitsNodes()) {
    return true;
  }
  for (int other = 0; other < count(); ++other) {
    if (!ranks_[other].finished && see_.pairing->closed(other) < see_.pairing->closed(rank)) {
      return true;
    }
  }
  return false;
}

int Leavers::MayGo(bool sums_under_way) const {
  for (int rank = 0; rank < count(); ++rank) {
    if (leaving(rank) && (*see_.sessions)[rank] != nullptr && !see_.steps->stepped(rank) &&
        !(leaving_finished(rank) && LeavesInOrder(rank) && OthersNeedGradientsOf(rank, sums_under_way))) {
      return rank;
    }
  }
  return -1;
}

// Whoever reads full parameters, or was let into a pass to read, needs nobody any more; everything else that ranks do
// together does. So a rank may be the first to leave the pass that its last step was committed with, or that was a
// forward alone: whoever goes on to a backward, or to another pass, is told then (CheckNobodyFinished).
bool Leavers::AnyMidway() const {
  bool midway = see_.pairing->any_seen();
  for (int rank = 0; rank < count(); ++rank) {
    const bool reads =
        see_.full_params->inside(rank) ? !see_.full_params->writes(rank) : see_.full_params->request(rank).OnlyReads();
    const bool only_reads = reads && !ranks_[rank].finished;  // else it left what it was inside of
    midway = midway || see_.steps->stepped(rank) || see_.hand_ins->open(rank) || see_.passes->entering(rank) ||
             see_.value_commit->asked(rank) || see_.pairing->closed(rank) > 0 ||
             (see_.full_params->asked(rank) && !only_reads);
  }
  return midway;
}

absl::Status Leavers::CheckNobodyFinished(int rank, absl::string_view what, int backward) const {
  for (int other = 0; other < count(); ++other) {
    const bool finished = ranks_[other].finished || (leaving_finished(other) && !see_.steps->stepped(other));
    if (finished && other != rank && see_.pairing->closed(other) <= backward) {
      return see_.committed->RankError(
          absl::StatusCode::kFailedPrecondition, rank, what,
          absl::StrCat("rank ", other, " has finished and takes part in nothing any more"));
    }
  }
  return absl::OkStatus();
}

void Leavers::EndEpoch() {
  for (OfRank& rank : ranks_) {
    rank.leaving.reset();
  }
}

}  // namespace shardd
