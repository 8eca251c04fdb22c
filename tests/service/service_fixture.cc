#include "tests/service/service_fixture.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpcpp/create_channel_posix.h"
#include "server/observe/trace_sink.h"

namespace shardd::testing_service {
namespace {

template <typename Request>
std::optional<uint32_t> UidOf(const Request& request) {
  return request.has_uid() ? std::optional<uint32_t>(request.uid()) : std::nullopt;
}

}  // namespace

UniqueFd ConnectTo(const std::string& path) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), std::min(path.size(), sizeof(address.sun_path) - 1));
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    ADD_FAILURE() << "connect " << path << ": " << std::strerror(errno);
    return UniqueFd();
  }
  return socket;
}

void SendBytes(int socket, absl::string_view bytes) {
  EXPECT_EQ(::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
}

bool IsClosedWithin(int socket, absl::Duration within) {
  const absl::Time deadline = absl::Now() + within;
  for (;;) {
    pollfd poll = {socket, POLLIN, 0};
    const int64_t left_ms = std::max<int64_t>(0, absl::ToInt64Milliseconds(deadline - absl::Now()));
    if (::poll(&poll, 1, static_cast<int>(left_ms)) <= 0) {
      return false;
    }
    char buffer[256];
    const ssize_t bytes = ::recv(socket, buffer, sizeof(buffer), 0);
    if (bytes <= 0) {
      return bytes == 0 || errno == ECONNRESET;
    }
  }
}

std::vector<FakeJobsSource::Call> FakeJobsSource::calls() const {
  absl::MutexLock lock(&mutex_);
  return calls_;
}

template <typename T>
void FakeJobsSource::Deliver(Call call, absl::StatusOr<T> answer, Done<T> done) {
  {
    absl::MutexLock lock(&mutex_);
    calls_.push_back(std::move(call));
  }
  if (!error.ok()) {
    answer = error;
  }
  delivery([answer = std::move(answer), done = std::move(done)] { done(answer); });
}

template <typename T>
absl::StatusOr<T> FakeJobsSource::Find(const std::map<std::string, T>& of_job, const std::string& job) {
  const auto it = of_job.find(job);
  if (it == of_job.end()) {
    return absl::NotFoundError(absl::StrCat("find job \"", job.substr(0, 128), "\": no such job"));
  }
  return it->second;
}

void FakeJobsSource::GetDaemon(const Caller& caller, Done<v1::Daemon> done) {
  Deliver<v1::Daemon>({"GetDaemon", caller, "", 0}, daemon, std::move(done));
}
void FakeJobsSource::ListJobs(const Caller& caller, Done<v1::ListJobsResponse> done) {
  Deliver<v1::ListJobsResponse>({"ListJobs", caller, "", 0}, jobs, std::move(done));
}
void FakeJobsSource::ListRanks(const Caller& caller, const v1::JobRef& job, Done<v1::ListRanksResponse> done) {
  Deliver({"ListRanks", caller, job.job(), 0, UidOf(job)}, Find(ranks, job.job()), std::move(done));
}
void FakeJobsSource::ListGroups(const Caller& caller, const v1::JobRef& job, Done<v1::ListGroupsResponse> done) {
  Deliver({"ListGroups", caller, job.job(), 0, UidOf(job)}, Find(groups, job.job()), std::move(done));
}
void FakeJobsSource::ListParameters(const Caller& caller, const v1::JobRef& job,
                                    Done<v1::ListParametersResponse> done) {
  Deliver({"ListParameters", caller, job.job(), 0, UidOf(job)}, Find(parameters, job.job()), std::move(done));
}
void FakeJobsSource::ListStreams(const Caller& caller, Done<v1::ListStreamsResponse> done) {
  Deliver<v1::ListStreamsResponse>({"ListStreams", caller, "", 0}, streams, std::move(done));
}
void FakeJobsSource::GetMetrics(const Caller& caller, Done<v1::GetMetricsResponse> done) {
  Deliver<v1::GetMetricsResponse>({"GetMetrics", caller, "", 0}, metrics, std::move(done));
}
void FakeJobsSource::GetMemory(const Caller& caller, const v1::JobRef& job, Done<v1::Memory> done) {
  Deliver({"GetMemory", caller, job.job(), 0, UidOf(job)}, Find(memory, job.job()), std::move(done));
}
void FakeJobsSource::ListEvents(const Caller& caller, const v1::JobRef& job, int limit,
                                Done<v1::ListEventsResponse> done) {
  v1::ListEventsResponse chosen;
  for (const v1::Event& event : events.events()) {
    if ((job.job().empty() || event.job() == job.job()) && chosen.events_size() < limit) {
      *chosen.add_events() = event;
    }
  }
  Deliver<v1::ListEventsResponse>({"ListEvents", caller, job.job(), limit, UidOf(job)}, std::move(chosen),
                                  std::move(done));
}
void FakeJobsSource::TraceJob(const Caller& caller, const v1::TraceJobRequest& request,
                              std::shared_ptr<TraceSink> sink) {
  {
    absl::MutexLock lock(&mutex_);
    calls_.push_back({"TraceJob", caller, request.job(), request.steps(), UidOf(request)});
  }
  if (take_sink) {
    take_sink(std::move(sink));
    return;
  }
  absl::Status status = error.ok() ? Find(ranks, request.job()).status() : error;
  delivery([this, status, sink = std::move(sink)] {
    for (const v1::TraceJobResponse& message : trace) {
      if (status.ok()) {
        sink->Send(message);
      }
    }
    sink->Finish(status);
  });
}
void FakeJobsSource::CloseJobByName(const Caller& caller, const v1::JobRef& job,
                                    Done<v1::CloseJobByNameResponse> done) {
  v1::CloseJobByNameResponse response;
  response.set_existed(ranks.count(job.job()) != 0);
  Deliver<v1::CloseJobByNameResponse>({"CloseJobByName", caller, job.job(), 0, UidOf(job)}, std::move(response),
                                      std::move(done));
}

void ServiceTest::Start(const ListenerOptions& options) {
  std::vector<GrpcServer::NamedService> services;
  services.push_back({v1::JobsService::service_full_name(),
                      std::make_unique<JobsService>(&source_, &registry_, ::geteuid(), &handover_)});
  absl::StatusOr<std::unique_ptr<GrpcServer>> server =
      GrpcServer::Create(std::move(services), {.reflection = &registry_, .channelz = true});
  ASSERT_TRUE(server.ok()) << server.status();
  server_ = *std::move(server);
  absl::StatusOr<std::unique_ptr<Listener>> listener =
      Listener::Create(path(), server_->server(), &registry_, handler_, options);
  ASSERT_TRUE(listener.ok()) << listener.status();
  listener_ = *std::move(listener);
}

void ServiceTest::TearDown() {
  if (listener_ != nullptr) {
    listener_->Stop();
  }
  if (server_ != nullptr) {
    server_->Shutdown(absl::ZeroDuration());
  }
}

void ServiceTest::LetOthersIn() const {
  ::chmod(dir_.path().c_str(), 0755);
  ::chmod((dir_.path() + "/run").c_str(), 0755);
  ::chmod(path().c_str(), 0666);
}

std::shared_ptr<grpc::Channel> ServiceTest::Channel() const {
  grpc::ChannelArguments arguments;
  // Channels with equal arguments share a connection; each test client here wants its own.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel("unix:" + path(), grpc::InsecureChannelCredentials(), arguments);
}

std::shared_ptr<grpc::Channel> ServiceTest::ChannelOfThisThread() const {
  UniqueFd socket = ConnectTo(path());
  ::fcntl(socket.get(), F_SETFL, ::fcntl(socket.get(), F_GETFL) | O_NONBLOCK);
  return grpc::CreateInsecureChannelFromFd("shardd", socket.release());
}

std::unique_ptr<grpc::ClientContext> ServiceTest::Context() {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(absl::ToChronoTime(absl::Now() + kPatience));
  return context;
}

}  // namespace shardd::testing_service
