// The real shardctl against a real socket: what it prints, and the exit codes that scripts rely on.

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/service/service_fixture.h"
#include "tests/testing/programs.h"

namespace shardd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using testing_service::Eventually;

struct Output {
  int exit_code = -1;  // -signal where one ended it
  std::string out;
  std::string err;
};

// A running shardctl. Its environment is this process's, with `environment` ("NAME=value") on top.
class Shardctl {
 public:
  Shardctl(const std::vector<std::string>& arguments, const std::vector<std::string>& environment) {
    std::vector<std::string> words = {"env", "-u", "SHARDD_ADDRESS", "-u", "XDG_RUNTIME_DIR"};
    words.insert(words.end(), environment.begin(), environment.end());
    words.push_back(testing::ProgramPath("shardctl"));
    words.insert(words.end(), arguments.begin(), arguments.end());
    std::vector<char*> argv;
    for (std::string& word : words) {
      argv.push_back(word.data());
    }
    argv.push_back(nullptr);
    int out[2];
    int err[2];
    EXPECT_EQ(::pipe2(out, O_CLOEXEC), 0);
    EXPECT_EQ(::pipe2(err, O_CLOEXEC), 0);
    out_.reset(out[0]);
    err_.reset(err[0]);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(out[1], STDOUT_FILENO);
      ::dup2(err[1], STDERR_FILENO);
      ::execvp("env", argv.data());
      ::_exit(127);
    }
    ::close(out[1]);
    ::close(err[1]);
  }
  ~Shardctl() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
  }

  void Interrupt() { ::kill(pid_, SIGINT); }
  // One read of standard output; empty at its end.
  std::string ReadSome() { return ReadOnce(out_.get()); }
  Output Finish() {
    Output output;
    std::thread errors([&] { output.err = ReadAll(err_.get()); });
    output.out = ReadAll(out_.get());
    errors.join();
    int status = 0;
    EXPECT_EQ(::waitpid(pid_, &status, 0), pid_);
    pid_ = -1;
    output.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    return output;
  }

 private:
  static std::string ReadOnce(int fd) {
    char buffer[4096];
    const ssize_t bytes = ::read(fd, buffer, sizeof(buffer));
    return std::string(buffer, bytes > 0 ? static_cast<size_t>(bytes) : 0);
  }
  static std::string ReadAll(int fd) {
    std::string all;
    for (std::string some = ReadOnce(fd); !some.empty(); some = ReadOnce(fd)) {
      all += some;
    }
    return all;
  }

  pid_t pid_ = -1;
  UniqueFd out_;
  UniqueFd err_;
};

class ShardctlTest : public testing_service::ServiceTest {
 protected:
  void AddJob(const std::string& name) {
    v1::Job* job = source_.jobs.add_jobs();
    job->set_name(name);
    job->set_world_size(2);
    job->set_attached_ranks(2);
    job->set_state(v1::JOB_STATE_IDLE);
    job->set_committed_step(41);
    source_.ranks[name].add_ranks()->set_last_command("Unshard layers.0 of " + name);
    source_.groups[name].add_groups()->set_name("layers.0");
    source_.parameters[name].add_parameters()->set_fqn("layers.0.weight");
    source_.memory[name].add_purposes()->set_purpose("shards");
    source_.metrics.mutable_daemon()->set_version("9.9.9");
    v1::JobMetrics& metrics = *source_.metrics.add_jobs();
    metrics.set_name(name);
    metrics.set_world_size(2);
    metrics.set_committed_step(41);
  }
  // Steps 5 to 7, with a span of the sixth.
  static std::vector<v1::TraceJobResponse> WholeTrace() {
    std::vector<v1::TraceJobResponse> messages(3);
    messages[0].mutable_start()->set_job("gpt");
    messages[0].mutable_start()->set_world_size(2);
    v1::TraceSpan& span = *messages[1].mutable_spans()->add_spans();
    span.set_kind(v1::TRACE_KIND_STEP);
    span.set_step(6);
    span.set_end_ns(1000);
    messages[2].mutable_end()->set_reason(v1::TRACE_END_REASON_STEPS);
    messages[2].mutable_end()->set_first_step(5);
    messages[2].mutable_end()->set_last_step(7);
    return messages;
  }
  // With --address of this test's server.
  Output Run(std::vector<std::string> arguments, const std::vector<std::string>& environment = {}) {
    arguments.push_back("--address=unix:" + path());
    return Shardctl(arguments, environment).Finish();
  }
};

TEST_F(ShardctlTest, EveryCommandPrintsATable) {
  AddJob("gpt");
  source_.daemon.set_version("9.9.9");
  source_.streams.add_streams()->set_name("post_backward");
  source_.events.add_events()->set_text("rank 1 died");
  source_.events.mutable_events(0)->set_job("gpt");
  Start();
  const std::vector<std::pair<std::vector<std::string>, std::string>> wanted = {
      {{"status"}, "shardd 9.9.9"},       {{"jobs"}, "gpt"},
      {{"job", "gpt"}, "committed step"}, {{"ranks", "gpt"}, "Unshard layers.0 of gpt"},
      {{"groups", "gpt"}, "layers.0"},    {{"params", "gpt"}, "layers.0.weight"},
      {{"memory", "gpt"}, "shards"},      {{"streams"}, "post_backward"},
      {{"events"}, "rank 1 died"},        {{"events", "gpt", "--limit", "5"}, "rank 1 died"},
      {{"top", "--once"}, "gpt"},         {{"top", "gpt", "--once"}, "Unshard layers.0 of gpt"},
      {{"close", "gpt"}, "closed gpt"},
  };
  for (const auto& [arguments, text] : wanted) {
    const Output output = Run(arguments);
    EXPECT_EQ(output.exit_code, 0) << absl::StrJoin(arguments, " ") << ": " << output.err;
    EXPECT_THAT(output.out, AllOf(HasSubstr(text), Not(HasSubstr("\x1b")))) << absl::StrJoin(arguments, " ");
    EXPECT_THAT(output.err, IsEmpty());
  }
}

TEST_F(ShardctlTest, JsonIsProtobufJsonAndWatchGivesOneLineEach) {
  AddJob("gpt");
  Start();
  const Output output = Run({"jobs", "--json"});
  EXPECT_EQ(output.exit_code, 0);
  EXPECT_THAT(output.out, AllOf(HasSubstr("\"name\": \"gpt\""), HasSubstr("\"committed_step\": \"41\""),
                                HasSubstr("\"state\": \"JOB_STATE_IDLE\"")));

  Shardctl watching({"jobs", "--json", "--watch", "0.01", "--address", path()}, {});
  std::string text;
  ASSERT_TRUE(Eventually([&] {
    text += watching.ReadSome();
    return std::count(text.begin(), text.end(), '\n') >= 3;
  })) << text;
  EXPECT_THAT(text, HasSubstr("}\n{"));
  watching.Interrupt();
  EXPECT_EQ(watching.Finish().exit_code, -SIGINT);
}

TEST_F(ShardctlTest, TopPrintsOneObjectALineUntilInterrupted) {
  AddJob("gpt");
  Start();
  Shardctl watching({"top", "--json", "--address", path()}, {});
  std::string text;
  ASSERT_TRUE(Eventually([&] {
    text += watching.ReadSome();
    return std::count(text.begin(), text.end(), '\n') >= 2;
  })) << text;
  EXPECT_THAT(text, AllOf(HasSubstr("\"committed_step\":41"), HasSubstr("}\n{"), Not(HasSubstr("\x1b"))));
  watching.Interrupt();
  EXPECT_EQ(watching.Finish().exit_code, -SIGINT);
}

TEST_F(ShardctlTest, TopIsOfTheUserThatIsNamed) {
  AddJob("gpt");
  AddJob("gpt");
  source_.metrics.mutable_jobs(0)->set_uid(1000);
  source_.metrics.mutable_jobs(1)->set_uid(1001);
  Start();
  EXPECT_THAT(Run({"top", "gpt", "--once"}).err, AllOf(HasSubstr("uid 1000, uid 1001"), HasSubstr("--uid")));
  EXPECT_THAT(Run({"top", "gpt", "--once", "--uid", "1001"}).out, HasSubstr("gpt (uid 1001)"));
  EXPECT_EQ(source_.calls().back().uid, 1001u);
  EXPECT_THAT(Run({"top", "--once", "--uid", "1001"}).out, AllOf(HasSubstr(" 1001 "), Not(HasSubstr(" 1000 "))));
}

TEST_F(ShardctlTest, WatchEndsWhenTheDaemonGoes) {
  AddJob("gpt");
  Start();
  Shardctl watching({"jobs", "--watch=0.01", "--address", path()}, {});
  ASSERT_FALSE(watching.ReadSome().empty());
  listener_->Stop();
  server_->Shutdown(absl::ZeroDuration());
  EXPECT_EQ(watching.Finish().exit_code, 4);
}

TEST_F(ShardctlTest, TheOnlyJobNeedNotBeNamed) {
  AddJob("gpt");
  Start();
  EXPECT_THAT(Run({"ranks"}).out, HasSubstr("Unshard layers.0 of gpt"));
  EXPECT_EQ(Run({"job"}).exit_code, 0);
}

TEST_F(ShardctlTest, OneOfSeveralJobsMustBeNamed) {
  AddJob("gpt");
  AddJob("vit");
  Start();
  const Output output = Run({"ranks"});
  EXPECT_EQ(output.exit_code, 2);
  EXPECT_THAT(output.err, HasSubstr("there are several (gpt, vit)"));
  EXPECT_THAT(Run({"ranks", "vit"}).out, HasSubstr("Unshard layers.0 of vit"));
}

TEST_F(ShardctlTest, TheSecretComesFromAFileOrTheEnvironment) {
  AddJob("gpt");
  source_.trace = WholeTrace();
  Start();
  dir_.Write("secret", "0123456789abcdef\n");
  const std::string file = dir_.File("secret");
  ASSERT_EQ(::chmod(file.c_str(), 0600), 0);
  const std::string trace = dir_.File("trace.json");
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"ranks", "gpt"}, {"trace", "gpt", "-o", trace}, {"close", "gpt"}, {"jobs"}}) {
    std::vector<std::string> with_file = arguments;
    with_file.insert(with_file.end(), {"--job_secret_file", file});
    EXPECT_EQ(Run(with_file).exit_code, 0);
    EXPECT_EQ(Run(arguments, {"SHARDD_JOB_SECRET_FILE=" + file}).exit_code, 0);
    EXPECT_EQ(Run(arguments, {"SHARDD_JOB_SECRET=0123456789abcdef", "SHARDD_JOB_SECRET_FILE=/none"}).exit_code, 0);
  }
  ASSERT_EQ(source_.calls().size(), 12u);
  for (const auto& call : source_.calls()) {
    EXPECT_TRUE(call.caller.tenant == source_.calls()[0].caller.tenant) << call.method;
    EXPECT_TRUE(call.caller.tenant.secret.has_value()) << call.method;
  }
  ASSERT_EQ(::chmod(file.c_str(), 0644), 0);
  const Output refused = Run({"jobs", "--job_secret_file", file});
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_THAT(refused.err, AllOf(HasSubstr(file), HasSubstr("others may read or change it (got mode 0644"),
                                 Not(HasSubstr("0123456789"))));
}

TEST_F(ShardctlTest, OfJobsOfOneNameTheUsersIsChosen) {
  AddJob("gpt");
  AddJob("gpt");
  source_.jobs.mutable_jobs(0)->set_uid(1000);
  source_.jobs.mutable_jobs(1)->set_uid(1001);
  Start();
  const Output both = Run({"job", "gpt"});
  EXPECT_EQ(both.exit_code, 2);
  EXPECT_THAT(both.err, AllOf(HasSubstr("uid 1000, uid 1001"), HasSubstr("--uid")));
  EXPECT_THAT(Run({"job", "gpt", "--uid", "1001"}).out, HasSubstr("uid 1001"));
  EXPECT_THAT(Run({"job", "--uid", "1001"}).out, HasSubstr("uid 1001"));
  EXPECT_THAT(Run({"jobs", "--uid", "1001"}).out, AllOf(HasSubstr("1001"), Not(HasSubstr("1000"))));
  EXPECT_EQ(Run({"ranks", "gpt", "--uid", "1001"}).exit_code, 0);
  EXPECT_EQ(Run({"close", "gpt", "--uid", "1001"}).exit_code, 0);
  EXPECT_EQ(source_.calls().back().method, "CloseJobByName");
  EXPECT_EQ(source_.calls().back().uid, 1001u);
}

TEST_F(ShardctlTest, NoSuchJobIsExitCode3) {
  Start();
  const std::pair<const char*, const char*> operations[] = {{"job", "show"},
                                                            {"ranks", "list ranks of"},
                                                            {"groups", "list groups of"},
                                                            {"params", "list parameters of"},
                                                            {"memory", "show memory of"},
                                                            {"trace", "trace"},
                                                            {"close", "close"}};
  for (const auto& [command, operation] : operations) {
    std::vector<std::string> arguments = {command, "none"};
    if (arguments[0] == "trace") {
      arguments.insert(arguments.end(), {"-o", dir_.path() + "/trace.json"});
    }
    const Output output = Run(arguments);
    EXPECT_EQ(output.exit_code, 3) << command;
    EXPECT_THAT(output.out, IsEmpty()) << command;
    EXPECT_EQ(output.err, absl::StrCat("shardctl: ", operation,
                                       " job \"none\": no such job; `shardctl jobs` lists those that are there\n"));
  }
  const Output no_top = Run({"top", "none", "--once"});
  EXPECT_EQ(no_top.exit_code, 3);
  EXPECT_THAT(no_top.err, HasSubstr("no such job"));
  const Output none = Run({"ranks"});
  EXPECT_EQ(none.exit_code, 3);
  EXPECT_THAT(none.err, HasSubstr("choose job: there is none; "));
}

TEST_F(ShardctlTest, ATraceIsWrittenAndToldHowToOpen) {
  AddJob("gpt");
  source_.ranks["gpt"];
  source_.trace = WholeTrace();
  Start();
  const std::string file = dir_.path() + "/trace.json";
  const Output output = Run({"trace", "-o", file});
  EXPECT_EQ(output.exit_code, 0) << output.err;
  EXPECT_THAT(output.out, AllOf(HasSubstr("3 whole steps (5 to 7) of 2 ranks, 1 spans in " + file),
                                HasSubstr("https://ui.perfetto.dev")));
  EXPECT_THAT(testing::ReadWholeFile(file), AllOf(HasSubstr("\"traceEvents\":["), HasSubstr("\"step 6\"")));
  const Output piped = Run({"trace", "gpt", "-o", "-"});
  EXPECT_EQ(piped.exit_code, 0) << piped.err;
  EXPECT_EQ(piped.out, testing::ReadWholeFile(file));
}

TEST_F(ShardctlTest, EarlyEndedTracesAreWrittenAndTheExitCodeExplains) {
  source_.ranks["gpt"];
  source_.trace = WholeTrace();
  Start();
  const std::string file = dir_.path() + "/trace.json";
  const std::pair<v1::TraceEndReason, int> reasons[] = {{v1::TRACE_END_REASON_JOB_ENDED, 1},
                                                        {v1::TRACE_END_REASON_TIMEOUT, 5}};
  for (const auto& [reason, exit_code] : reasons) {
    ::unlink(file.c_str());
    source_.trace.back().mutable_end()->set_reason(reason);
    source_.trace.back().mutable_end()->set_text("so it is");
    const Output output = Run({"trace", "gpt", "-o", file});
    EXPECT_EQ(output.exit_code, exit_code) << output.err;
    EXPECT_THAT(output.err, AllOf(HasSubstr("so it is"), HasSubstr("3 whole steps (5 to 7)"), HasSubstr(file)));
    EXPECT_THAT(testing::ReadWholeFile(file), HasSubstr("\"step 6\""));
  }
}

TEST_F(ShardctlTest, OnlyATraceWithWholeStepsReplacesAFile) {
  source_.ranks["gpt"];
  source_.trace = WholeTrace();
  Start();
  const std::string file = dir_.path() + "/trace.json";
  source_.trace.back().mutable_end()->set_reason(v1::TRACE_END_REASON_TIMEOUT);
  source_.trace.back().mutable_end()->set_last_step(4);
  EXPECT_EQ(Run({"trace", "gpt", "-o", file}).exit_code, 5);
  EXPECT_THAT(testing::ReadWholeFile(file), HasSubstr("\"step 6\"")) << "there was nothing to keep";
  dir_.Write("trace.json", "good");
  const Output output = Run({"trace", "gpt", "-o", file});
  EXPECT_EQ(output.exit_code, 5);
  EXPECT_THAT(output.err, HasSubstr("0 whole steps of 2 ranks, 1 spans; " + file + " is left as it was"));
  EXPECT_EQ(testing::ReadWholeFile(file), "good");
  source_.trace = WholeTrace();
  EXPECT_EQ(Run({"trace", "gpt", "-o", file}).exit_code, 0);
  EXPECT_THAT(testing::ReadWholeFile(file), HasSubstr("\"step 6\""));
  EXPECT_NE(::access((file + ".part").c_str(), F_OK), 0);
  EXPECT_EQ(Run({"trace", "gpt", "-o", "/dev/null"}).exit_code, 0);
  struct stat null;
  ASSERT_EQ(::stat("/dev/null", &null), 0);
  EXPECT_TRUE(S_ISCHR(null.st_mode));
  EXPECT_THAT(Run({"trace", "gpt", "-o", dir_.path()}).err, HasSubstr("Is a directory"));
}

TEST_F(ShardctlTest, UnwritableTracesAskNobodyAndUnknownJobsLeaveNoFile) {
  AddJob("gpt");
  Start();
  const Output output = Run({"trace", "gpt", "-o", dir_.path() + "/none/trace.json"});
  EXPECT_EQ(output.exit_code, 1);
  EXPECT_THAT(output.err, HasSubstr("/none/trace.json\": No such file or directory"));
  EXPECT_TRUE(source_.calls().empty());
  EXPECT_EQ(Run({"trace", "none", "-o", dir_.path() + "/trace.json"}).exit_code, 3);
  EXPECT_NE(::access((dir_.path() + "/trace.json").c_str(), F_OK), 0);
  EXPECT_NE(::access((dir_.path() + "/trace.json.part").c_str(), F_OK), 0);
}

TEST_F(ShardctlTest, ErrorsOfTheDaemonAreExitCode1) {
  source_.error = absl::InternalError("the core is on fire");
  Start();
  const Output output = Run({"jobs"});
  EXPECT_EQ(output.exit_code, 1);
  EXPECT_EQ(output.err, "shardctl: the core is on fire\n");
}

TEST_F(ShardctlTest, UsageErrorsAreExitCode2) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{}, {"nonsense"}, {"jobs", "--nonsense"}, {"close"}, {"jobs", "--address=host:80"}}) {
    const Output output = Shardctl(arguments, {}).Finish();
    EXPECT_EQ(output.exit_code, 2) << absl::StrJoin(arguments, " ");
    EXPECT_THAT(output.err, HasSubstr("shardctl: ")) << absl::StrJoin(arguments, " ");
  }
}

TEST_F(ShardctlTest, HelpAndVersionNeedNoDaemon) {
  const Output help = Shardctl({"help"}, {"SHARDD_ADDRESS=/nowhere"}).Finish();
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_THAT(help.out, AllOf(HasSubstr("usage: shardctl"), HasSubstr("exit codes:")));
  const Output version = Shardctl({"--version"}, {"SHARDD_ADDRESS=/nowhere"}).Finish();
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_THAT(version.out, HasSubstr("shardctl "));
}

TEST_F(ShardctlTest, UnreachableDaemonIsExitCode4AndNamesTheSocket) {
  const Output output = Shardctl({"jobs", "--address", dir_.path() + "/none.sock"}, {}).Finish();
  EXPECT_EQ(output.exit_code, 4);
  EXPECT_THAT(output.err,
              AllOf(HasSubstr(dir_.path() + "/none.sock"),
                    HasSubstr("no daemon there (No such file or directory); start one with `shardd --listen=unix:")));
}

TEST_F(ShardctlTest, DaemonThatDoesNotAnswerIsExitCode4) {
  std::vector<std::function<void()>> held;
  source_.delivery = [&held](std::function<void()> deliver) { held.push_back(std::move(deliver)); };
  Start();
  const Output output = Run({"jobs", "--timeout=0.2"});
  EXPECT_EQ(output.exit_code, 4);
  EXPECT_THAT(output.err, AllOf(HasSubstr(path()), HasSubstr("no answer within 200ms; ")));
}

TEST_F(ShardctlTest, AddressComesFromTheEnvironment) {
  AddJob("gpt");
  Start();
  const Output output = Shardctl({"jobs"}, {"SHARDD_ADDRESS=unix:" + path()}).Finish();
  EXPECT_EQ(output.exit_code, 0) << output.err;
  EXPECT_THAT(output.out, HasSubstr("gpt"));
}

TEST_F(ShardctlTest, OwnDaemonIsFoundInTheUsersRuntimeDirectory) {
  if (::access("/run/shardd/shardd.sock", F_OK) == 0) {
    GTEST_SKIP() << "a system daemon's socket is there and comes first";
  }
  AddJob("gpt");
  Start();
  ASSERT_EQ(::rename((dir_.path() + "/run").c_str(), (dir_.path() + "/shardd").c_str()), 0);
  const Output found = Shardctl({"jobs"}, {"XDG_RUNTIME_DIR=" + dir_.path()}).Finish();
  EXPECT_EQ(found.exit_code, 0) << found.err;
  EXPECT_THAT(found.out, HasSubstr("gpt"));
  // So that the fixture finds what it removes.
  ASSERT_EQ(::rename((dir_.path() + "/shardd").c_str(), (dir_.path() + "/run").c_str()), 0);
}

}  // namespace
}  // namespace shardd
