#include "server/service/jobs_service.h"

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "grpcpp/health_check_service_interface.h"
#include "gtest/gtest.h"
#include "tests/service/service_fixture.h"

namespace shardd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing_service::Eventually;
using testing_service::kPatience;
using testing_service::RunAsUid;
using testing_service::ServiceTest;

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
    EXPECT_EQ(call.caller.uid, ::geteuid());
    EXPECT_TRUE(call.caller.is_admin);
  }
  EXPECT_THAT(seen, ElementsAre("GetDaemon ", "ListJobs ", "ListRanks gpt", "ListGroups gpt", "ListParameters gpt",
                                "ListStreams ", "GetMemory gpt", "ListEvents ", "CloseJobByName gpt"));
}

TEST_F(JobsServiceTest, AnotherUidIsNoAdmin) {
  if (::geteuid() != 0) {
    GTEST_SKIP() << "needs root to connect as another uid";
  }
  Start();
  ::chmod(dir_.path().c_str(), 0755);
  ::chmod((dir_.path() + "/run").c_str(), 0755);
  ::chmod(path().c_str(), 0666);
  std::shared_ptr<grpc::Channel> channel;
  RunAsUid(12345, [&] { channel = ChannelOfThisThread(); });
  v1::ListJobsResponse jobs;
  auto context = Context();
  const grpc::Status status = v1::JobsService::NewStub(channel)->ListJobs(context.get(), {}, &jobs);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(source_.calls().size(), 1u);
  EXPECT_EQ(source_.calls()[0].caller.uid, 12345u);
  EXPECT_FALSE(source_.calls()[0].caller.is_admin);
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
  absl::Notification asked;
  std::function<void()> deliver;
  source_.delivery = [&](std::function<void()> later) {
    deliver = std::move(later);
    asked.Notify();
  };
  Start();
  std::thread core([&] {
    asked.WaitForNotification();
    deliver();
  });
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
  absl::Notification asked;
  std::function<void()> deliver;
  source_.delivery = [&](std::function<void()> later) {
    deliver = std::move(later);
    asked.Notify();
  };
  Start();
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Milliseconds(200)));
  v1::ListRanksResponse ranks;
  EXPECT_EQ(Jobs()->ListRanks(&context, Ref("gpt"), &ranks).error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  asked.WaitForNotification();
  deliver();
  source_.delivery = [](const std::function<void()>& now) { now(); };
  EXPECT_EQ(ListRanks("none").error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(JobsServiceTest, ShutdownWaitsForARunningCallWithinItsGrace) {
  source_.ranks["gpt"];
  absl::Notification asked;
  std::function<void()> deliver;
  source_.delivery = [&](std::function<void()> later) {
    deliver = std::move(later);
    asked.Notify();
  };
  Start();
  grpc::Status status;
  std::thread client([&] { status = ListRanks("gpt"); });
  asked.WaitForNotification();
  listener_->Stop();
  std::thread shutdown([&] { server_->Shutdown(kPatience); });
  deliver();
  shutdown.join();
  client.join();
  EXPECT_TRUE(status.ok()) << status.error_message();
  server_->Shutdown(absl::ZeroDuration());
}

TEST_F(JobsServiceTest, ARequestTooLargeForANameIsRefusedAndAsksNobody) {
  Start();
  const grpc::Status status = ListRanks(std::string(16 << 20, 'x'));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("list ranks"));
  EXPECT_TRUE(source_.calls().empty());
}

}  // namespace
}  // namespace shardd
