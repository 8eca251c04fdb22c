#ifndef SHARDD_CLIENT_CTL_TOP_H_
#define SHARDD_CLIENT_CTL_TOP_H_

#include <string>

#include "client/ctl/views.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd::ctl {

// What `shardctl top` shows: pure functions. Figures are of the steps since `before`, the answer before this one, or of
// the last step where there is none (common/figures/figures.h).
struct TopAnswers {
  v1::GetMetricsResponse now;
  const v1::GetMetricsResponse* before = nullptr;  // null: this is the first answer
};

// A line for each job: its pace, its goodput, the rank that the others wait for with the share of their time, memory.
std::string ShowTop(const TopAnswers& answers, const View& view);

// One job, with a line for each of its ranks. `rows`: how many ranks there is room for, 0: all; where there are more,
// those are shown that are not there or that others wait for.
// REQUIRES: `job` is one of `answers.now`; ranks are that job's.
std::string ShowTop(const TopAnswers& answers, const v1::JobMetrics& job, const v1::ListRanksResponse& ranks, int rows,
                    const View& view);

// The same figures as one JSON object in a line; numbers are numbers, times are seconds. With `ranks`, which may be
// null, of `job` alone.
std::string TopJson(const TopAnswers& answers, const v1::JobMetrics* job, const v1::ListRanksResponse* ranks);

}  // namespace shardd::ctl

#endif  // SHARDD_CLIENT_CTL_TOP_H_
