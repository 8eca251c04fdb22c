// A client without our protos, in another language, finds and calls everything over the Unix socket.

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"
#include "gtest/gtest.h"
#include "server/service/reflection_service.h"
#include "tests/service/service_fixture.h"
#include "tests/testing/build_paths.h"
#include "tests/testing/daemon_process.h"
#include "tests/testing/files.h"

namespace shardd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kSkipped = 77;

struct Result {
  int exit_code = -1;
  std::string output;
};

// Debian's python3: another one in PATH does not see the packaged modules.
Result RunClient(const std::string& address, const std::string& arguments) {
  const std::string command = absl::StrCat("/usr/bin/python3 ", built::kSourceDir,
                                           "/tests/service/reflection_client.py ", address, " ", arguments, " 2>&1");
  Result result;
  FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) {
    return result;
  }
  std::array<char, 4096> buffer;
  size_t bytes;
  while ((bytes = ::fread(buffer.data(), 1, buffer.size(), pipe)) > 0) {
    result.output.append(buffer.data(), bytes);
  }
  const int status = ::pclose(pipe);
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return result;
}

class ReflectionTest : public testing_service::ServiceTest {
 protected:
  Result Run(const std::string& arguments) { return RunClient("unix:" + path(), arguments); }
};

// The daemon itself: its trainer service has no fake behind it.
class DaemonReflectionTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(daemon_.listened()) << testing::ReadWholeFile(daemon_.log()); }
  Result Run(const std::string& arguments) { return RunClient(daemon_.address(), arguments); }

  testing::TempDir dir_;
  testing::DaemonProcess daemon_{dir_.path(), "cpu:1"};
};

#define RUN_OR_SKIP(result, arguments)                           \
  const Result result = Run(arguments);                          \
  if (result.exit_code == kSkipped || result.exit_code == 127) { \
    GTEST_SKIP() << "no generic client: " << result.output;      \
  }                                                              \
  ASSERT_EQ(result.exit_code, 0) << result.output

TEST_F(ReflectionTest, EveryServiceIsListed) {
  Start();
  RUN_OR_SKIP(result, "list");
  EXPECT_THAT(result.output,
              AllOf(HasSubstr("shardd.v1.JobsService"), HasSubstr("grpc.health.v1.Health"),
                    HasSubstr("grpc.channelz.v1.Channelz"), HasSubstr("grpc.reflection.v1alpha.ServerReflection")));
}

TEST_F(ReflectionTest, JobsServiceIsDescribedAndCalled) {
  source_.ranks["gpt"].add_ranks()->set_last_command("SubmitGradients layers.3");
  Start();
  RUN_OR_SKIP(described, "describe shardd.v1.JobsService");
  EXPECT_THAT(described.output, HasSubstr("ListRanks(shardd.v1.JobRef) -> shardd.v1.ListRanksResponse"));
  RUN_OR_SKIP(called, "call shardd.v1.JobsService ListRanks job=gpt");
  EXPECT_THAT(called.output, HasSubstr("\"last_command\": \"SubmitGradients layers.3\""));
}

TEST_F(DaemonReflectionTest, TheTrainerServiceIsDescribedAndRefusesOtherVersions) {
  RUN_OR_SKIP(listed, "list");
  EXPECT_THAT(listed.output, HasSubstr("shardd.v1.TrainerService"));
  RUN_OR_SKIP(described, "describe shardd.v1.TrainerService");
  EXPECT_THAT(described.output,
              AllOf(HasSubstr("OpenJob(shardd.v1.OpenJobRequest) -> shardd.v1.OpenJobResponse"),
                    HasSubstr("AttachRank(shardd.v1.AttachRankRequest) -> shardd.v1.AttachRankResponse"),
                    HasSubstr("Session(shardd.v1.SessionRequest) -> shardd.v1.SessionEvent")));
  const Result called =
      Run("call shardd.v1.TrainerService OpenJob protocol_version=9999 spec.name=reflected spec.world_size=1");
  EXPECT_NE(called.exit_code, 0);
  EXPECT_THAT(called.output, AllOf(HasSubstr("FAILED_PRECONDITION"), HasSubstr("9999")));
}

// What the unit says of reflection and the like; its paths are a machine's.
std::vector<std::string> FlagsOfTheUnit() {
  std::vector<std::string> flags;
  const std::string unit = testing::ReadWholeFile(absl::StrCat(built::kSourceDir, "/deploy/systemd/shardd.service"));
  const size_t begin = unit.find("\nExecStart=");
  for (absl::string_view word :
       absl::StrSplit(unit.substr(begin, unit.find("\nExecReload=") - begin), absl::ByAnyChar(" \n"))) {
    if (!absl::StartsWith(word, "--") || absl::StrContains(word, "/") || absl::StrContains(word, "$")) continue;
    flags.emplace_back(word);
  }
  return flags;
}

TEST(Reflection, OperatorsCallIsThereWithTheShippedFlags) {
  const testing::TempDir dir;
  testing::DaemonProcess daemon(dir.path(), "cpu:1", FlagsOfTheUnit());
  ASSERT_TRUE(daemon.listened()) << testing::ReadWholeFile(daemon.log());
  const auto Run = [&](const std::string& arguments) { return RunClient(daemon.address(), arguments); };
  RUN_OR_SKIP(listed, "list");
  EXPECT_THAT(listed.output, HasSubstr("shardd.v1.JobsService"));
  EXPECT_THAT(listed.output, ::testing::Not(HasSubstr("channelz"))) << "gRPC decodes its requests without limits";
  RUN_OR_SKIP(described, "describe shardd.v1.JobsService");
  EXPECT_THAT(described.output, HasSubstr("ListJobs(shardd.v1.ListJobsRequest) -> shardd.v1.ListJobsResponse"));
  RUN_OR_SKIP(called, "call shardd.v1.JobsService GetDaemon");
  EXPECT_THAT(called.output, HasSubstr("\"version\""));
}

using Stream = grpc::ClientReaderWriter<grpc::reflection::v1alpha::ServerReflectionRequest,
                                        grpc::reflection::v1alpha::ServerReflectionResponse>;

TEST_F(ReflectionTest, HasSmallRequestsAndFewStreams) {
  Start();
  const auto stub = grpc::reflection::v1alpha::ServerReflection::NewStub(Channel());
  grpc::reflection::v1alpha::ServerReflectionRequest request;
  grpc::reflection::v1alpha::ServerReflectionResponse response;
  {
    request.set_host(std::string(1 << 20, 'x'));
    const auto context = Context();
    const std::unique_ptr<Stream> stream = stub->ServerReflectionInfo(context.get());
    stream->Write(request);
    EXPECT_FALSE(stream->Read(&response));
    const grpc::Status status = stream->Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  }
  request.Clear();
  request.set_list_services("");
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<Stream>> open;
  for (size_t i = 0; i < ReflectionService::kMaxStreamsPerUid; ++i) {
    contexts.push_back(Context());
    open.push_back(stub->ServerReflectionInfo(contexts.back().get()));
    ASSERT_TRUE(open.back()->Write(request) && open.back()->Read(&response)) << i;
    EXPECT_EQ(response.list_services_response().service_size(), 4) << response.ShortDebugString();
  }
  {
    const auto context = Context();
    const std::unique_ptr<Stream> stream = stub->ServerReflectionInfo(context.get());
    stream->Write(request);
    EXPECT_FALSE(stream->Read(&response));
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  }
  // Those that are open go on, with many questions each, and one that is asked for nothing.
  request.set_file_containing_symbol("no.such.Symbol");
  ASSERT_TRUE(open[0]->Write(request) && open[0]->Read(&response));
  EXPECT_EQ(response.error_response().error_code(), grpc::StatusCode::NOT_FOUND);
  for (const auto& stream : open) {
    stream->WritesDone();
    EXPECT_TRUE(stream->Finish().ok());
  }
}

TEST(Reflection, CanBeTurnedOffAndHealthStays) {
  const testing::TempDir dir;
  testing::DaemonProcess daemon(dir.path(), "cpu:1", {"--reflection=false"});
  ASSERT_TRUE(daemon.listened());
  const Result listed = RunClient(daemon.address(), "list");
  if (listed.exit_code == kSkipped) {
    GTEST_SKIP() << listed.output;
  }
  EXPECT_NE(listed.exit_code, 0);
  EXPECT_THAT(listed.output, HasSubstr("UNIMPLEMENTED"));
}

TEST_F(ReflectionTest, HealthIsDescribedAndAnswersPerService) {
  Start();
  RUN_OR_SKIP(described, "describe grpc.health.v1.Health");
  EXPECT_THAT(described.output,
              HasSubstr("Check(grpc.health.v1.HealthCheckRequest) -> grpc.health.v1.HealthCheckResponse"));
  RUN_OR_SKIP(whole, "call grpc.health.v1.Health Check");
  EXPECT_THAT(whole.output, HasSubstr("\"status\": \"SERVING\""));
  RUN_OR_SKIP(jobs, "call grpc.health.v1.Health Check service=shardd.v1.JobsService");
  EXPECT_THAT(jobs.output, HasSubstr("\"status\": \"SERVING\""));
  const Result unknown = Run("call grpc.health.v1.Health Check service=no.such.Service");
  EXPECT_NE(unknown.exit_code, 0);
  EXPECT_THAT(unknown.output, HasSubstr("NOT_FOUND"));
  server_->SetServing(false);
  RUN_OR_SKIP(stopped, "call grpc.health.v1.Health Check service=shardd.v1.JobsService");
  EXPECT_THAT(stopped.output, HasSubstr("\"status\": \"NOT_SERVING\""));
}

TEST_F(ReflectionTest, ChannelzCountsTheServersCalls) {
  Start();
  RUN_OR_SKIP(result, "call grpc.channelz.v1.Channelz GetServers");
  EXPECT_THAT(result.output, HasSubstr("\"calls_started\""));
}

}  // namespace
}  // namespace shardd
