#ifndef SHARDD_CLIENT_CTL_HISTORY_VIEWS_H_
#define SHARDD_CLIENT_CTL_HISTORY_VIEWS_H_

#include <string>

#include "client/ctl/views.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd::ctl {

// A line for each event and for each step, or for some steps together: the time of one step by phases, the rank that
// the others waited for, norm and clip factor.
std::string Show(const v1::ListHistoryResponse& history, const View& view);

// The last aborts of a job in plain words, out of its events: when, which step was dropped, why, what each lost rank
// did last, and how long it took until ranks were there again.
std::string ShowWhy(const std::string& job, const v1::ListHistoryResponse& events);

}  // namespace shardd::ctl

#endif  // SHARDD_CLIENT_CTL_HISTORY_VIEWS_H_
