#ifndef SHARDD_SERVER_METRICS_STATUS_JSON_H_
#define SHARDD_SERVER_METRICS_STATUS_JSON_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "server/metrics/viewer.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

// What the daemon said of itself and of all jobs that this process may see.
struct StatusFacts {
  absl::Time time;   // when it did, by the clock for people
  absl::Time asked;  // the same moment, by a clock that nobody sets
  v1::GetMetricsResponse metrics;
  v1::ListJobsResponse jobs;
  v1::GetMetricsResponse before;  // metrics of the answer before; empty: there is none that is new enough
  absl::Duration since_before;    // between the two
};

// An end of a job's epoch, or what led to one, with whose job it was.
struct Incident {
  v1::Event event;
  uint32_t uid = 0;
  bool has_secret = false;
  bool operator==(const Incident& other) const {
    return event.unix_us() == other.event.unix_us() && event.job() == other.event.job() &&
           event.kind() == other.event.kind() && event.rank() == other.event.rank();
  }
};
// "abort", "epoch", "lost" or "refused".
bool IsIncident(const v1::Event& event);

// The job whose ranks are shown one by one.
struct SelectedRanks {
  std::string job;
  uint32_t uid = 0;
  v1::ListRanksResponse ranks;
};

// What the page draws (server/metrics/page/README.md says which member means what), as JSON in ASCII or UTF-8. `viewer`
// decides which jobs and incidents are there, and how many are hidden. `selected`: null: no job is. Times are seconds
// or unix milliseconds, as the names say. Pure.
std::string StatusJson(const StatusFacts& facts, const std::vector<Incident>& incidents, const SelectedRanks* selected,
                       const Viewer& viewer);
// The same, where the daemon does not answer.
std::string StatusJson(const absl::Status& error, const Viewer& viewer);

}  // namespace shardd

#endif  // SHARDD_SERVER_METRICS_STATUS_JSON_H_
