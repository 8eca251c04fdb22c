#ifndef SHARDD_CLIENT_CTL_VIEWS_H_
#define SHARDD_CLIENT_CTL_VIEWS_H_

#include <string>

#include "absl/time/time.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd::ctl {

// The daemon's answers as text for people: pure functions. `now` turns times into ages.
struct View {
  bool color = false;
  absl::Time now;
  bool handles = false;
};

std::string Show(const v1::Daemon& daemon, const std::string& address, const View& view);
std::string Show(const v1::ListJobsResponse& jobs, const View& view);
std::string Show(const v1::Job& job, const View& view);
std::string Show(const v1::ListRanksResponse& ranks, const View& view);
std::string Show(const v1::ListGroupsResponse& groups, const View& view);
std::string Show(const v1::ListParametersResponse& parameters, const View& view);
std::string Show(const v1::Memory& memory, const View& view);
std::string Show(const v1::ListStreamsResponse& streams, const View& view);
std::string Show(const v1::ListEventsResponse& events, const View& view);

}  // namespace shardd::ctl

#endif  // SHARDD_CLIENT_CTL_VIEWS_H_
