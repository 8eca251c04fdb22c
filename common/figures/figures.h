#ifndef SHARDD_COMMON_FIGURES_FIGURES_H_
#define SHARDD_COMMON_FIGURES_FIGURES_H_

#include <array>
#include <vector>

#include "shardd/v1/jobs.pb.h"

namespace shardd {

// The rank that others waited for longest, and the share of their time for which they did.
struct Straggler {
  int rank = -1;  // nobody waited
  double share = 0;
};

// The phases of a step, in the order in which they are shown; together they are its duration.
inline constexpr std::array<const char*, 6> kPhaseNames = {"forward",   "backward",  "waiting",
                                                           "reduction", "optimizer", "commit"};

// What a job does now, out of two answers of GetMetrics. Times are of one step, in seconds: means over the steps that
// were committed between the two answers, or, where there are none, of the last step.
struct JobFigures {
  double step_s = -1;                                    // from the commit before; negative: no step was committed yet
  std::array<double, kPhaseNames.size()> phases_s = {};  // by kPhaseNames
  // At the pace of those steps; less where the next commit takes longer than they did.
  double steps_per_s = 0;
  Straggler slowest;
  // By rank of this node: the share of the others' time for which they waited for it. Ranks from the 64th on have no
  // count of their own, and are 0 here; `slowest` is right for them, too.
  std::vector<double> awaited;
};

// `before`: an earlier answer about the same job; null, or of a daemon or job that has begun anew since: there is none.
JobFigures FiguresOf(const v1::JobMetrics& now, const v1::JobMetrics* before);

// The share of its time that the job spent in steps that stand, without waiting for one slow rank; what runs is not
// counted yet. Negative: no time has passed.
double GoodputOf(const v1::JobTime& time);

// Time that was lost, in seconds: in work that was dropped, and in steps that were taken back.
double LostSecondsOf(const v1::JobTime& time);

}  // namespace shardd

#endif  // SHARDD_COMMON_FIGURES_FIGURES_H_
