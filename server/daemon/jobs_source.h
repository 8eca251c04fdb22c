#ifndef SHARDD_SERVER_DAEMON_JOBS_SOURCE_H_
#define SHARDD_SERVER_DAEMON_JOBS_SOURCE_H_

#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "server/tenant/tenant.h"
#include "shardd/v1/jobs.pb.h"

namespace shardd {

class TraceSink;

// Who asks: the uid as the kernel says it (SO_PEERCRED), and the secret that the call gives.
struct Caller {
  Tenant tenant;
  bool is_admin = false;   // root or the daemon's own uid, in the daemon's namespaces: sees the jobs of all
  bool is_viewer = false;  // of the group that sees the jobs of all, and changes none but its own

  bool SeesAll() const { return is_admin || is_viewer; }
  bool MaySee(const Tenant& owner) const { return SeesAll() || owner.Admits(tenant); }
};

// What JobsService asks the daemon's core for. Every method returns at once and calls `done` exactly once, from any
// thread, also from within the call; the core never waits for the data path to answer. `done` must be called before the
// gRPC server is shut down for good, or be destroyed uncalled: the rpc then ends with CANCELLED.
//
// NOT_FOUND where there is no such job, also where another user has it. PERMISSION_DENIED: the caller has its uid and
// not its secret. INVALID_ARGUMENT: several users have one of that name, and who sees all does not say which.
class JobsSource {
 public:
  template <typename T>
  using Done = std::function<void(absl::StatusOr<T>)>;

  virtual ~JobsSource() = default;

  virtual void GetDaemon(const Caller& caller, Done<v1::Daemon> done) = 0;
  virtual void ListJobs(const Caller& caller, Done<v1::ListJobsResponse> done) = 0;
  virtual void ListRanks(const Caller& caller, const v1::JobRef& job, Done<v1::ListRanksResponse> done) = 0;
  virtual void ListGroups(const Caller& caller, const v1::JobRef& job, Done<v1::ListGroupsResponse> done) = 0;
  virtual void ListParameters(const Caller& caller, const v1::JobRef& job, Done<v1::ListParametersResponse> done) = 0;
  virtual void ListStreams(const Caller& caller, Done<v1::ListStreamsResponse> done) = 0;
  virtual void GetMetrics(const Caller& caller, Done<v1::GetMetricsResponse> done) = 0;
  virtual void GetMemory(const Caller& caller, const v1::JobRef& job, Done<v1::Memory> done) = 0;
  // Without a name: of all jobs that the caller may see. `limit` is between 1 and EventLog::kCapacity.
  virtual void ListEvents(const Caller& caller, const v1::JobRef& job, int limit,
                          Done<v1::ListEventsResponse> done) = 0;
  // Calls nothing but the sink, once Finish; or drops it.
  virtual void TraceJob(const Caller& caller, const v1::TraceJobRequest& request, std::shared_ptr<TraceSink> sink) = 0;
  // `existed` false where NOT_FOUND would be another call's answer: closing twice is no error.
  virtual void CloseJobByName(const Caller& caller, const v1::JobRef& job, Done<v1::CloseJobByNameResponse> done) = 0;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_DAEMON_JOBS_SOURCE_H_
