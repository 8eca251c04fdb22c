#ifndef SHARDD_SERVER_METRICS_METRICS_SOURCE_H_
#define SHARDD_SERVER_METRICS_METRICS_SOURCE_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "shardd/v1/jobs.grpc.pb.h"

namespace shardd {

// The daemon that is asked. Connects when it is needed, and again to the next daemon at the same socket. Thread-safe.
//
// Each call blocks for `limit` at most. UNAVAILABLE: nobody listens there. DEADLINE_EXCEEDED: the daemon does not
// answer. Others: as JobsService has them.
class MetricsSource {
 public:
  // `socket`: the path of the daemon's.
  explicit MetricsSource(const std::string& socket);
  virtual ~MetricsSource() = default;

  virtual absl::StatusOr<v1::GetMetricsResponse> Get(absl::Duration limit) const;
  virtual absl::StatusOr<v1::ListJobsResponse> Jobs(absl::Duration limit) const;
  virtual absl::StatusOr<v1::ListRanksResponse> Ranks(const v1::JobRef& job, absl::Duration limit) const;
  virtual absl::StatusOr<v1::ListEventsResponse> Events(const v1::ListEventsRequest& which, absl::Duration limit) const;
  virtual absl::StatusOr<v1::ListHistoryResponse> History(const v1::ListHistoryRequest& which,
                                                          absl::Duration limit) const;

 private:
  const std::unique_ptr<v1::JobsService::Stub> jobs_;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_METRICS_METRICS_SOURCE_H_
