#ifndef SHARDD_TESTS_SERVICE_SERVICE_FIXTURE_H_
#define SHARDD_TESTS_SERVICE_SERVICE_FIXTURE_H_

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/shm/unique_fd.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "server/daemon/jobs_source.h"
#include "server/service/grpc_server.h"
#include "server/service/jobs_service.h"
#include "server/service/listener.h"
#include "server/service/peer_registry.h"
#include "shardd/v1/jobs.grpc.pb.h"
#include "tests/testing/files.h"
#include "tests/testing/poll.h"
#include "tests/testing/run_as_uid.h"

namespace shardd::testing_service {

// No wait of these tests is longer; reaching it is a failure.
inline constexpr absl::Duration kPatience = absl::Seconds(20);

using testing::RunAsUid;
using testing::TempDir;

// Polls `condition` until it holds; false after kPatience.
inline bool Eventually(const std::function<bool()>& condition) { return testing::PollUntil(condition, kPatience); }

// Raw connections, as a client that is not ours would make them.
UniqueFd ConnectTo(const std::string& path);
void SendBytes(int socket, absl::string_view bytes);
// True when the peer closes within `within`; bytes that arrive before are skipped.
bool IsClosedWithin(int socket, absl::Duration within);

// Answers every call at once with what is set here; records who asked what.
class FakeJobsSource : public JobsSource {
 public:
  struct Call {
    std::string method;
    Caller caller;
    std::string job;
    int limit = 0;
    std::optional<uint32_t> uid = std::nullopt;  // whose job
  };

  v1::Daemon daemon;
  v1::ListJobsResponse jobs;
  // By job; other jobs are NOT_FOUND.
  std::map<std::string, v1::ListRanksResponse> ranks;
  std::map<std::string, v1::ListGroupsResponse> groups;
  std::map<std::string, v1::ListParametersResponse> parameters;
  std::map<std::string, v1::Memory> memory;
  v1::ListStreamsResponse streams;
  v1::GetMetricsResponse metrics;
  v1::ListEventsResponse events;
  // What a trace of a job that has ranks consists of, sent before Finish.
  std::vector<v1::TraceJobResponse> trace;
  // Where set: what is done with the sink instead; kept.
  std::function<void(std::shared_ptr<TraceSink>)> take_sink;

  // What happens to an answer; the default delivers it on the spot.
  std::function<void(std::function<void()> deliver)> delivery = [](std::function<void()> deliver) { deliver(); };
  // Not OK: every call gets it.
  absl::Status error;

  std::vector<Call> calls() const;

  void GetDaemon(const Caller& caller, Done<v1::Daemon> done) override;
  void ListJobs(const Caller& caller, Done<v1::ListJobsResponse> done) override;
  void ListRanks(const Caller& caller, const v1::JobRef& job, Done<v1::ListRanksResponse> done) override;
  void ListGroups(const Caller& caller, const v1::JobRef& job, Done<v1::ListGroupsResponse> done) override;
  void ListParameters(const Caller& caller, const v1::JobRef& job, Done<v1::ListParametersResponse> done) override;
  void ListStreams(const Caller& caller, Done<v1::ListStreamsResponse> done) override;
  void GetMetrics(const Caller& caller, Done<v1::GetMetricsResponse> done) override;
  void GetMemory(const Caller& caller, const v1::JobRef& job, Done<v1::Memory> done) override;
  void ListEvents(const Caller& caller, const v1::JobRef& job, int limit, Done<v1::ListEventsResponse> done) override;
  void TraceJob(const Caller& caller, const v1::TraceJobRequest& request, std::shared_ptr<TraceSink> sink) override;
  void CloseJobByName(const Caller& caller, const v1::JobRef& job, Done<v1::CloseJobByNameResponse> done) override;

 private:
  template <typename T>
  void Deliver(Call call, absl::StatusOr<T> answer, Done<T> done);
  template <typename T>
  static absl::StatusOr<T> Find(const std::map<std::string, T>& of_job, const std::string& job);

  mutable absl::Mutex mutex_;
  std::vector<Call> calls_ ABSL_GUARDED_BY(mutex_);
};

// A server with the jobs service behind a listener, as the daemon has it.
class ServiceTest : public ::testing::Test {
 protected:
  // Starts with `options` and, for the fd channel, `handler_`. Called by the test where it wants other than SetUp's.
  void Start(const ListenerOptions& options = {});
  void TearDown() override;

  std::string path() const { return dir_.path() + "/run/shardd.sock"; }
  // Users other than the daemon's reach the socket from here on.
  void LetOthersIn() const;
  std::shared_ptr<grpc::Channel> Channel() const;
  // A connection that this call makes on the calling thread (gRPC connects on its own threads).
  std::shared_ptr<grpc::Channel> ChannelOfThisThread() const;
  std::unique_ptr<v1::JobsService::Stub> Jobs() const { return v1::JobsService::NewStub(Channel()); }
  static std::unique_ptr<grpc::ClientContext> Context();

  TempDir dir_;
  FakeJobsSource source_;
  PeerRegistry registry_;
  Handover handover_{&source_, /*custody=*/nullptr, /*embedded=*/false, [] {}};
  Listener::Handler handler_ = [](FdRequest, PeerCredentials, FdReply reply) {
    reply(absl::UnimplementedError("no handler"));
  };
  std::unique_ptr<GrpcServer> server_;
  std::unique_ptr<Listener> listener_;
};

}  // namespace shardd::testing_service

#endif  // SHARDD_TESTS_SERVICE_SERVICE_FIXTURE_H_
