#include "server/service/jobs_service.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "common/shm/fd_channel_internal.h"
#include "common/shm/unique_fd.h"
#include "gmock/gmock.h"
#include "grpcpp/create_channel_posix.h"
#include "grpcpp/health_check_service_interface.h"
#include "gtest/gtest.h"
#include "server/job/wait.h"
#include "server/observe/trace_sink.h"
#include "tests/service/service_fixture.h"
#include "tests/testing/process.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using testing_service::Eventually;
using testing_service::FakeJobsSource;
using testing_service::kPatience;
using testing_service::RunAsUid;
using testing_service::ServiceTest;

// The answer to the next call comes when the test says so.
class LateAnswer {
 public:
  explicit LateAnswer(FakeJobsSource* source) {
    source->delivery = [this](std::function<void()> deliver) {
      deliver_ = std::move(deliver);
      asked_.Notify();
    };
  }
  // Waits for the call. What it returns delivers the answer.
  std::function<void()> WhenAsked() {
    asked_.WaitForNotification();
    return deliver_;
  }

 private:
  absl::Notification asked_;
  std::function<void()> deliver_;
};

class JobsServiceTest : public ServiceTest {
 protected:
  v1::JobRef Ref(const std::string& job) {
    v1::JobRef ref;
    ref.set_job(job);
    return ref;
  }
  grpc::Status ListRanks(const std::string& job, v1::ListRanksResponse* response = nullptr) {
    v1::ListRanksResponse ignored;
    auto context = Context();
    return Jobs()->ListRanks(context.get(), Ref(job), response == nullptr ? &ignored : response);
  }
};

TEST_F(JobsServiceTest, EveryCallReachesTheSourceWithItsJob) {
  source_.ranks["gpt"].add_ranks()->set_rank(3);
  source_.groups["gpt"].add_groups()->set_name("layers.0");
  source_.parameters["gpt"].add_parameters()->set_fqn("layers.0.weight");
  source_.memory["gpt"].set_planned_bytes(11);
  source_.streams.add_streams()->set_name("unshard");
  source_.metrics.add_jobs()->set_committed_step(12);
  source_.jobs.add_jobs()->set_name("gpt");
  source_.daemon.set_pid(4711);
  Start();
  auto stub = Jobs();

  v1::Daemon daemon;
  EXPECT_TRUE(stub->GetDaemon(Context().get(), {}, &daemon).ok());
  EXPECT_EQ(daemon.pid(), 4711);
  v1::ListJobsResponse jobs;
  EXPECT_TRUE(stub->ListJobs(Context().get(), {}, &jobs).ok());
  EXPECT_EQ(jobs.jobs(0).name(), "gpt");
  v1::ListRanksResponse ranks;
  EXPECT_TRUE(stub->ListRanks(Context().get(), Ref("gpt"), &ranks).ok());
  EXPECT_EQ(ranks.ranks(0).rank(), 3);
  v1::ListGroupsResponse groups;
  EXPECT_TRUE(stub->ListGroups(Context().get(), Ref("gpt"), &groups).ok());
  EXPECT_EQ(groups.groups(0).name(), "layers.0");
  v1::ListParametersResponse parameters;
  EXPECT_TRUE(stub->ListParameters(Context().get(), Ref("gpt"), &parameters).ok());
  EXPECT_EQ(parameters.parameters(0).fqn(), "layers.0.weight");
  v1::ListStreamsResponse streams;
  EXPECT_TRUE(stub->ListStreams(Context().get(), {}, &streams).ok());
  EXPECT_EQ(streams.streams(0).name(), "unshard");
  v1::GetMetricsResponse metrics;
  EXPECT_TRUE(stub->GetMetrics(Context().get(), {}, &metrics).ok());
  EXPECT_EQ(metrics.jobs(0).committed_step(), 12);
  v1::Memory memory;
  EXPECT_TRUE(stub->GetMemory(Context().get(), Ref("gpt"), &memory).ok());
  EXPECT_EQ(memory.planned_bytes(), 11);
  v1::ListEventsResponse events;
  EXPECT_TRUE(stub->ListEvents(Context().get(), {}, &events).ok());
  v1::CloseJobByNameResponse closed;
  EXPECT_TRUE(stub->CloseJobByName(Context().get(), Ref("gpt"), &closed).ok());
  EXPECT_TRUE(closed.existed());

  std::vector<std::string> seen;
  for (const auto& call : source_.calls()) {
    seen.push_back(call.method + " " + call.job);
    EXPECT_EQ(call.caller.tenant.uid, ::geteuid());
    EXPECT_TRUE(call.caller.is_admin);
  }
  EXPECT_THAT(seen, ElementsAre("GetDaemon ", "ListJobs ", "ListRanks gpt", "ListGroups gpt", "ListParameters gpt",
                                "ListStreams ", "GetMetrics ", "GetMemory gpt", "ListEvents ", "CloseJobByName gpt"));
}

TEST_F(JobsServiceTest, ASecretIsOfItsCallAlone) {
  Start();
  const std::string secret = "a secret of a job \x01\xff";
  const auto jobs = Jobs();
  const auto ask = [&](const std::vector<std::string>& given) {
    auto context = Context();
    for (const std::string& one : given) context->AddMetadata("shardd-job-secret-bin", one);
    v1::ListJobsResponse response;
    return jobs->ListJobs(context.get(), {}, &response);
  };
  EXPECT_TRUE(ask({secret}).ok());
  EXPECT_TRUE(ask({}).ok());
  EXPECT_TRUE(ask({secret}).ok());
  ASSERT_EQ(source_.calls().size(), 3u);
  EXPECT_TRUE(source_.calls()[0].caller.tenant == source_.calls()[2].caller.tenant);
  EXPECT_TRUE(source_.calls()[0].caller.tenant.secret.has_value());
  EXPECT_FALSE(source_.calls()[1].caller.tenant.secret.has_value());

  for (const std::vector<std::string>& bad :
       {std::vector<std::string>{std::string(15, 'x')}, {std::string(65, 'x')}, {""}, {secret, secret}}) {
    const grpc::Status status = ask(bad);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr("job secret: "));
    EXPECT_THAT(status.error_message(), Not(HasSubstr("a secret of a job")));
  }
  EXPECT_EQ(source_.calls().size(), 3u);
}

TEST_F(JobsServiceTest, TheUidOfAJobIsPassedOn) {
  source_.ranks["gpt"].add_ranks()->set_rank(3);
  Start();
  v1::JobRef ref = Ref("gpt");
  ref.set_uid(12345);
  v1::ListRanksResponse ranks;
  EXPECT_TRUE(Jobs()->ListRanks(Context().get(), ref, &ranks).ok());
  v1::ListEventsRequest which;
  which.set_job("gpt");
  which.set_uid(12346);
  v1::ListEventsResponse events;
  EXPECT_TRUE(Jobs()->ListEvents(Context().get(), which, &events).ok());
  v1::ListEventsResponse of_all;
  EXPECT_TRUE(Jobs()->ListEvents(Context().get(), {}, &of_all).ok());
  ASSERT_EQ(source_.calls().size(), 3u);
  EXPECT_EQ(source_.calls()[0].uid, 12345u);
  EXPECT_EQ(source_.calls()[1].uid, 12346u);
  EXPECT_EQ(source_.calls()[2].uid, std::nullopt);
}

TEST_F(JobsServiceTest, AnotherUidIsNoAdmin) {
  if (::geteuid() != 0) {
    GTEST_SKIP() << "needs root to connect as another uid";
  }
  Start();
  LetOthersIn();
  std::shared_ptr<grpc::Channel> channel;
  RunAsUid(12345, [&] { channel = ChannelOfThisThread(); });
  v1::ListJobsResponse jobs;
  auto context = Context();
  const grpc::Status status = v1::JobsService::NewStub(channel)->ListJobs(context.get(), {}, &jobs);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(source_.calls().size(), 1u);
  EXPECT_EQ(source_.calls()[0].caller.tenant.uid, 12345u);
  EXPECT_FALSE(source_.calls()[0].caller.is_admin);
}

// A process that has uid 0, or the daemon's, in a user namespace of its own, as a container's has: connects, gives the
// connection to its parent, and lives until that closes `pair`.
int ConnectFromANamespace(const std::string& path, int pair) {
  const auto write = [](const char* name, const std::string& text) {
    const UniqueFd file(::open(name, O_WRONLY | O_CLOEXEC));
    return ::write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size());
  };
  const std::string map = "0 " + std::to_string(::geteuid()) + " 1";
  if (::unshare(CLONE_NEWUSER) != 0 || !write("/proc/self/uid_map", map)) {
    return 1;
  }
  const UniqueFd connected = testing_service::ConnectTo(path);
  const int fd = connected.get();
  char byte = 0;
  iovec buffer = {&byte, 1};
  return shm_internal::SendWithDescriptors(pair, &buffer, 1, &fd, 1) == 1 && ::read(pair, &byte, 1) == 0 ? 0 : 2;
}

TEST_F(JobsServiceTest, TheSameUidInAnotherUserNamespaceIsNoAdmin) {
  Start();
  int pair[2] = {-1, -1};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
  UniqueFd ours(pair[0]);
  UniqueFd theirs(pair[1]);
  testing::Child child([&] {
    ours.reset();
    return ConnectFromANamespace(path(), theirs.get());
  });
  theirs.reset();
  char byte = 0;
  iovec buffer = {&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  msghdr message{};
  message.msg_iov = &buffer;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  if (::recvmsg(ours.get(), &message, MSG_CMSG_CLOEXEC) != 1) {
    GTEST_SKIP() << "this user can have no user namespace of its own (uid " << ::geteuid() << ")";
  }
  std::vector<UniqueFd> fds = shm_internal::TakeDescriptors(message);
  ASSERT_EQ(fds.size(), 1u);
  ASSERT_EQ(::fcntl(fds[0].get(), F_SETFL, ::fcntl(fds[0].get(), F_GETFL) | O_NONBLOCK), 0);
  const auto channel = grpc::CreateInsecureChannelFromFd("shardd", fds[0].release());
  v1::ListJobsResponse jobs;
  auto context = Context();
  const grpc::Status status = v1::JobsService::NewStub(channel)->ListJobs(context.get(), {}, &jobs);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(source_.calls().size(), 1u);
  EXPECT_EQ(source_.calls()[0].caller.tenant.uid, ::geteuid());
  EXPECT_FALSE(source_.calls()[0].caller.is_admin);
  ours.reset();
  EXPECT_EQ(child.Wait(kPatience), 0);
}

TEST_F(JobsServiceTest, CallerThatDidNotComeThroughTheListenerIsRefused) {
  Start();
  auto stub = v1::JobsService::NewStub(server_->server()->InProcessChannel({}));
  v1::ListJobsResponse jobs;
  auto context = Context();
  EXPECT_EQ(stub->ListJobs(context.get(), {}, &jobs).error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_TRUE(source_.calls().empty());
}

TEST_F(JobsServiceTest, EmptyJobIsInvalidAndNamed) {
  Start();
  const grpc::Status status = ListRanks("");
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("list ranks: field \"job\" is empty"));
  EXPECT_TRUE(source_.calls().empty());
}

TEST_F(JobsServiceTest, EventLimitHasADefaultAndACap) {
  Start();
  for (const auto& [asked, given] : {std::pair{0, 100}, {1, 1}, {4096, 4096}, {1 << 30, 4096}}) {
    v1::ListEventsRequest request;
    request.set_limit(asked);
    v1::ListEventsResponse response;
    ASSERT_TRUE(Jobs()->ListEvents(Context().get(), request, &response).ok());
    EXPECT_EQ(source_.calls().back().limit, given) << asked;
  }
  v1::ListEventsRequest request;
  request.set_limit(-1);
  v1::ListEventsResponse response;
  EXPECT_EQ(Jobs()->ListEvents(Context().get(), request, &response).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(JobsServiceTest, EveryStatusOfTheSourceArrivesWithItsText) {
  Start();
  for (int code = 1; code <= 16; ++code) {
    source_.error = absl::Status(static_cast<absl::StatusCode>(code), "why \"x\"");
    const grpc::Status status = ListRanks("gpt");
    EXPECT_EQ(static_cast<int>(status.error_code()), code);
    EXPECT_EQ(status.error_message(), "why \"x\"");
  }
}

TEST_F(JobsServiceTest, AnswerMayComeLaterFromAnotherThread) {
  source_.ranks["gpt"].add_ranks()->set_rank(3);
  LateAnswer answer(&source_);
  Start();
  std::thread core([&] { answer.WhenAsked()(); });
  v1::ListRanksResponse ranks;
  EXPECT_TRUE(ListRanks("gpt", &ranks).ok());
  EXPECT_EQ(ranks.ranks_size(), 1);
  core.join();
}

TEST_F(JobsServiceTest, DroppedCallbackEndsTheCallWithCancelled) {
  source_.delivery = [](const std::function<void()>&) {};
  Start();
  EXPECT_EQ(ListRanks("gpt").error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(JobsServiceTest, AnswerAfterTheClientsDeadlineIsHarmless) {
  LateAnswer answer(&source_);
  Start();
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Milliseconds(200)));
  v1::ListRanksResponse ranks;
  EXPECT_EQ(Jobs()->ListRanks(&context, Ref("gpt"), &ranks).error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  answer.WhenAsked()();
  source_.delivery = [](const std::function<void()>& now) { now(); };
  EXPECT_EQ(ListRanks("none").error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(JobsServiceTest, ShutdownWaitsForARunningCallWithinItsGrace) {
  source_.ranks["gpt"];
  LateAnswer answer(&source_);
  Start();
  grpc::Status status;
  std::thread client([&] { status = ListRanks("gpt"); });
  const std::function<void()> deliver = answer.WhenAsked();
  listener_->Stop();
  std::thread shutdown([&] { server_->Shutdown(kPatience); });
  deliver();
  shutdown.join();
  client.join();
  EXPECT_TRUE(status.ok()) << status.error_message();
  server_->Shutdown(absl::ZeroDuration());
}

TEST_F(JobsServiceTest, CallsThatAreNotAnsweredAreCountedByUid) {
  source_.ranks["gpt"];
  absl::Mutex mutex;
  std::vector<std::function<void()>> waiting;
  source_.delivery = [&](std::function<void()> later) {
    absl::MutexLock lock(&mutex);
    waiting.push_back(std::move(later));
  };
  Start();
  std::vector<std::thread> callers;
  std::atomic<int> answered = 0;
  for (size_t i = 0; i < JobsService::kMaxCallsPerUid; ++i) {
    callers.emplace_back([&] { answered += ListRanks("gpt").ok() ? 1 : 0; });
  }
  const auto waits = [&] {
    absl::MutexLock lock(&mutex);
    return waiting.size() == JobsService::kMaxCallsPerUid;
  };
  ASSERT_TRUE(Eventually(waits));
  const grpc::Status refused = ListRanks("gpt");
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(), HasSubstr("list ranks: too many calls are under way"));
  for (const auto& deliver : waiting) deliver();
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(answered, static_cast<int>(JobsService::kMaxCallsPerUid));
  source_.delivery = [](const std::function<void()>& now) { now(); };
  EXPECT_TRUE(Eventually([&] { return ListRanks("gpt").ok(); }));
}

TEST_F(JobsServiceTest, ATooLargeRequestIsRefusedAndAsksNobody) {
  Start();
  const grpc::Status status = ListRanks(std::string(16 << 20, 'x'));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("list ranks"));
  EXPECT_TRUE(source_.calls().empty());
}

class TraceJobTest : public JobsServiceTest {
 protected:
  // The messages that come, and what the call ends with.
  std::pair<std::vector<v1::TraceJobResponse>, grpc::Status> Trace(const v1::TraceJobRequest& request) {
    auto context = Context();
    const auto stub = Jobs();
    const auto reader = stub->TraceJob(context.get(), request);
    std::vector<v1::TraceJobResponse> messages;
    for (v1::TraceJobResponse message; reader->Read(&message);) {
      messages.push_back(message);
    }
    return {messages, reader->Finish()};
  }
  static v1::TraceJobRequest Request(const std::string& job, int steps = 0, int64_t timeout_ms = 0) {
    v1::TraceJobRequest request;
    request.set_job(job);
    request.set_steps(steps);
    request.set_timeout_ms(timeout_ms);
    return request;
  }
};

TEST_F(TraceJobTest, AllMessagesComeInOrderAndThenTheEnd) {
  source_.ranks["gpt"];
  source_.trace.resize(3);
  source_.trace[0].mutable_start()->set_job("gpt");
  source_.trace[1].mutable_spans()->add_spans()->set_label("reduce");
  source_.trace[2].mutable_end()->set_last_step(7);
  Start();
  const auto [messages, status] = Trace(Request("gpt", 5));
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(messages.size(), 3u);
  EXPECT_EQ(messages[0].start().job(), "gpt");
  EXPECT_EQ(messages[1].spans().spans(0).label(), "reduce");
  EXPECT_EQ(messages[2].end().last_step(), 7);
  ASSERT_EQ(source_.calls().size(), 1u);
  EXPECT_EQ(source_.calls()[0].caller.tenant.uid, ::geteuid());
  EXPECT_EQ(source_.calls()[0].limit, 5);
}

TEST_F(TraceJobTest, WhatIsOutOfRangeIsRefusedAndAsksNobody) {
  Start();
  for (const v1::TraceJobRequest& request :
       {Request(""), Request("gpt", -1), Request("gpt", 1001), Request("gpt", 1, -1), Request("gpt", 1, 600'001)}) {
    const auto [messages, status] = Trace(request);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << request.ShortDebugString();
    EXPECT_TRUE(messages.empty());
  }
  EXPECT_TRUE(source_.calls().empty());
}

TEST_F(TraceJobTest, UnknownJobsAreNotFoundAndDroppedSinksCancelled) {
  Start();
  EXPECT_EQ(Trace(Request("none")).second.error_code(), grpc::StatusCode::NOT_FOUND);
  source_.delivery = [](const std::function<void()>&) {};
  EXPECT_EQ(Trace(Request("none")).second.error_code(), grpc::StatusCode::CANCELLED);
}

// What a reader does not take waits for it up to a limit: spans are left out, the end never is.
TEST_F(TraceJobTest, ASlowReaderLosesSpansButNotTheEnd) {
  v1::TraceJobResponse spans;
  spans.mutable_spans()->add_spans()->set_label(std::string(1 << 20, 'x'));
  v1::TraceJobResponse end;
  end.mutable_end()->set_last_step(7);
  std::atomic<int> sent = 0, refused = 0;
  source_.take_sink = [&](const std::shared_ptr<TraceSink>& sink) {
    for (int i = 0; i < 64; ++i) {
      (sink->Send(spans) ? sent : refused) += 1;
    }
    sink->Send(end);
    sink->Finish(absl::OkStatus());
  };
  Start();
  auto context = Context();
  const auto stub = Jobs();
  const auto reader = stub->TraceJob(context.get(), Request("gpt"));
  ASSERT_TRUE(Eventually([&] { return sent + refused == 64; }));
  EXPECT_GT(refused, 0);
  EXPECT_LE(sent, 16) << "4 MiB here and what gRPC and the socket hold";
  int got = 0;
  v1::TraceJobResponse message;
  while (reader->Read(&message)) {
    got += message.has_spans() ? 1 : 0;
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(got, sent);
  EXPECT_EQ(message.end().last_step(), 7);
}

TEST_F(TraceJobTest, WhatIsPreparedOfTheStartIsMergedIntoIt) {
  source_.take_sink = [](const std::shared_ptr<TraceSink>& sink) {
    v1::TraceJobResponse start;
    start.mutable_start()->add_groups()->set_name("layers.0");
    start.mutable_start()->add_groups()->set_name("layers.1");
    sink->Prepare(start);
    start.Clear();
    start.mutable_start()->set_job("gpt");
    start.mutable_start()->set_begin_ns(7);
    sink->Send(start);
    sink->Finish(absl::OkStatus());
  };
  Start();
  const auto [messages, status] = Trace(Request("gpt"));
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(messages.size(), 1u);
  EXPECT_EQ(messages[0].start().job(), "gpt");
  EXPECT_EQ(messages[0].start().begin_ns(), 7);
  ASSERT_EQ(messages[0].start().groups_size(), 2);
  EXPECT_EQ(messages[0].start().groups(1).name(), "layers.1");
}

// A trace counts until its reader has read it, or is gone; one user's count for nobody else.
TEST_F(TraceJobTest, TooManyTracesAreRefusedEvenIfEndedUnread) {
  v1::TraceJobResponse spans;
  spans.mutable_spans()->add_spans()->set_label(std::string(1 << 20, 'x'));
  absl::Mutex mutex;
  std::vector<std::shared_ptr<TraceSink>> held;
  std::atomic<size_t> taken = 0;
  source_.take_sink = [&](std::shared_ptr<TraceSink> sink) {
    if (const absl::MutexLock lock(&mutex); held.size() < JobsService::kMaxTracesPerUid - 1) {
      held.push_back(std::move(sink));
      ++taken;
      return;
    }
    ++taken;
    // More than gRPC and the socket hold too: their windows grow, and what all of it fits in is over without a reader.
    for (int refused = 0, sends = 0; refused < 50 && sends < 4096; ++sends) {
      refused = sink->Send(spans) ? 0 : refused + 1;
      if (refused > 0) absl::SleepFor(absl::Milliseconds(5));
    }
    sink->Finish(absl::OkStatus());  // and is not read
  };
  Start();
  struct Call {
    std::unique_ptr<grpc::ClientContext> context;
    std::unique_ptr<grpc::ClientReader<v1::TraceJobResponse>> reader;
  };
  const auto stub = Jobs();
  std::vector<Call> calls(JobsService::kMaxTracesPerUid);
  for (size_t i = 0; i < calls.size(); ++i) {
    calls[i].context = Context();
    calls[i].reader = stub->TraceJob(calls[i].context.get(), Request("gpt"));
    // Not once it is recorded: the next call's thread could come first then, and another one than the last would end.
    ASSERT_TRUE(Eventually([&] { return taken == i + 1; }));
  }
  const auto [messages, status] = Trace(Request("gpt"));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr("want less than 8 of uid"));
  EXPECT_EQ(source_.calls().size(), calls.size());
  if (::geteuid() == 0) {
    LetOthersIn();
    std::shared_ptr<grpc::Channel> channel;
    RunAsUid(12345, [&] { channel = ChannelOfThisThread(); });
    auto context = Context();
    const auto reader = v1::JobsService::NewStub(channel)->TraceJob(context.get(), Request("gpt"));
    v1::TraceJobResponse message;
    EXPECT_TRUE(reader->Read(&message)) << "another user's";
    context->TryCancel();
  }
  v1::TraceJobResponse message;
  while (calls.back().reader->Read(&message)) {
  }
  EXPECT_TRUE(calls.back().reader->Finish().ok());
  EXPECT_TRUE(Eventually([&] { return Trace(Request("gpt")).second.ok(); }));
  const absl::MutexLock lock(&mutex);
  held.clear();
}

TEST_F(TraceJobTest, AReaderThatGoesAwayIsNoticed) {
  std::shared_ptr<TraceSink> held;
  absl::Notification asked;
  source_.take_sink = [&](std::shared_ptr<TraceSink> sink) {
    held = std::move(sink);
    asked.Notify();
  };
  Start();
  auto context = Context();
  const auto stub = Jobs();
  const auto reader = stub->TraceJob(context.get(), Request("gpt"));
  asked.WaitForNotification();
  EXPECT_FALSE(held->gone());
  context->TryCancel();
  EXPECT_TRUE(Eventually([&] { return held->gone(); }));
  v1::TraceJobResponse message;
  EXPECT_FALSE(reader->Read(&message));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  held->Send(message);  // leads nowhere
  held->Finish(absl::OkStatus());
}

}  // namespace
}  // namespace shardd
