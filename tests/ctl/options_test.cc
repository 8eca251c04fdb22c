#include "client/ctl/options.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardd::ctl {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

Options Parsed(const std::vector<std::string>& arguments) {
  absl::StatusOr<Options> options = ParseOptions(arguments);
  EXPECT_TRUE(options.ok()) << options.status();
  return options.ok() ? *options : Options();
}

std::string ErrorOf(const std::vector<std::string>& arguments) {
  const absl::StatusOr<Options> options = ParseOptions(arguments);
  EXPECT_EQ(options.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(options.status().message());
}

TEST(OptionsTest, OptionsStandAnywhereInEitherForm) {
  const Options options = Parsed({"--json", "--address=/x.sock", "ranks", "--timeout", "0.5", "gpt", "--handles"});
  EXPECT_EQ(options.command, Command::kRanks);
  EXPECT_EQ(options.job, "gpt");
  EXPECT_EQ(options.address, "/x.sock");
  EXPECT_TRUE(options.json);
  EXPECT_TRUE(options.handles);
  EXPECT_EQ(options.timeout, absl::Milliseconds(500));
}

TEST(OptionsTest, EveryCommandOfTheHelpParses) {
  for (const auto& [name, command] : std::vector<std::pair<std::string, Command>>{{"status", Command::kStatus},
                                                                                  {"jobs", Command::kJobs},
                                                                                  {"job", Command::kJob},
                                                                                  {"ranks", Command::kRanks},
                                                                                  {"groups", Command::kGroups},
                                                                                  {"params", Command::kParams},
                                                                                  {"memory", Command::kMemory},
                                                                                  {"streams", Command::kStreams},
                                                                                  {"events", Command::kEvents},
                                                                                  {"trace", Command::kTrace},
                                                                                  {"version", Command::kVersion},
                                                                                  {"help", Command::kHelp}}) {
    EXPECT_EQ(Parsed({name}).command, command) << name;
    EXPECT_THAT(HelpText(), HasSubstr("\n  " + name)) << name;
  }
  EXPECT_EQ(Parsed({"close", "gpt"}).command, Command::kClose);
}

TEST(OptionsTest, HelpOfACommandIsItsOwn) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"ranks", "--help"}, {"--help", "ranks", "gpt"}, {"ranks", "-h"}}) {
    const Options options = Parsed(arguments);
    EXPECT_EQ(options.command, Command::kHelp);
    EXPECT_EQ(options.help_of, "ranks");
  }
  EXPECT_EQ(Parsed({"--help"}).help_of, "");
  const std::string ranks = HelpText("ranks");
  EXPECT_THAT(ranks, HasSubstr("usage: shardctl ranks [JOB] [OPTION...]\n"));
  EXPECT_THAT(ranks, HasSubstr("--handles"));
  EXPECT_THAT(ranks, Not(HasSubstr("--steps")));
  EXPECT_THAT(ranks, Not(HasSubstr("\n  memory")));
  EXPECT_THAT(HelpText("trace"), AllOf(HasSubstr("--steps N"), HasSubstr("ui.perfetto.dev")));
  EXPECT_THAT(HelpText("close"), HasSubstr("usage: shardctl close JOB [OPTION...]\n"));
  EXPECT_THAT(HelpText("version"), Not(HasSubstr("options:")));
}

TEST(OptionsTest, ATraceHasStepsAFileAndMoreTime) {
  const Options options = Parsed({"trace", "gpt", "-o", "/tmp/x.json", "--steps=7"});
  EXPECT_EQ(options.job, "gpt");
  EXPECT_EQ(options.output, "/tmp/x.json");
  EXPECT_EQ(options.steps, 7);
  EXPECT_EQ(options.timeout, absl::Seconds(60));
  EXPECT_EQ(Parsed({"trace", "--output", "-"}).output, "-");
  EXPECT_EQ(Parsed({"trace"}).output, "trace.json");
  EXPECT_EQ(Parsed({"jobs"}).timeout, absl::Seconds(10));
}

TEST(OptionsTest, HelpAndVersionWinOverTheRest) {
  EXPECT_EQ(Parsed({"--help"}).command, Command::kHelp);
  EXPECT_EQ(Parsed({"close", "-h"}).command, Command::kHelp);
  EXPECT_EQ(Parsed({"--version"}).command, Command::kVersion);
}

TEST(OptionsTest, UsageErrorsSayWhatIsWrong) {
  EXPECT_THAT(ErrorOf({}), HasSubstr("command is missing"));
  EXPECT_THAT(ErrorOf({"job-list"}), HasSubstr("unknown command \"job-list\""));
  EXPECT_THAT(ErrorOf({"jobs", "--colour"}), HasSubstr("unknown option \"--colour\""));
  EXPECT_THAT(ErrorOf({"jobs", "gpt"}), HasSubstr("jobs: unexpected argument \"gpt\""));
  EXPECT_THAT(ErrorOf({"ranks", "a", "b"}), HasSubstr("ranks: unexpected argument \"b\""));
  EXPECT_THAT(ErrorOf({"close"}), HasSubstr("close: name of the job is missing"));
  EXPECT_THAT(ErrorOf({"close", "a", "--watch", "1"}), HasSubstr("close: --watch"));
  EXPECT_THAT(ErrorOf({"events", "--limit", "0"}), HasSubstr("--limit: not a number of events (got \"0\""));
  EXPECT_THAT(ErrorOf({"events", "--limit"}), HasSubstr("--limit: value is missing"));
  EXPECT_THAT(ErrorOf({"job", "--uid", "root"}), HasSubstr("--uid: not a uid (got \"root\""));
  EXPECT_THAT(ErrorOf({"job", "--uid=-1"}), HasSubstr("--uid: not a uid"));
  EXPECT_THAT(ErrorOf({"job", "--job_secret_file="}), HasSubstr("--job_secret_file: value is empty"));
  EXPECT_THAT(ErrorOf({"jobs", "--watch=-1"}), HasSubstr("--watch: not a time"));
  EXPECT_THAT(ErrorOf({"jobs", "--watch=nan"}), HasSubstr("--watch: not a time"));
  EXPECT_THAT(ErrorOf({"trace", "--steps", "0"}), HasSubstr("--steps: not a number of steps (got \"0\""));
  EXPECT_THAT(ErrorOf({"trace", "-o="}), HasSubstr("-o: value is empty"));
  EXPECT_THAT(ErrorOf({"trace", "--timeout", "601"}), HasSubstr("trace: --timeout is too long"));
  EXPECT_THAT(ErrorOf({"trace", "--watch", "1"}), HasSubstr("trace: --watch"));
  EXPECT_THAT(ErrorOf({"trace", "--json"}), HasSubstr("trace: --json"));
  EXPECT_THAT(ErrorOf({"jobs", "--json=1"}), HasSubstr("--json: takes no value"));
}

TEST(OptionsTest, AJobIsOneUsersAndMayHaveASecret) {
  const Options options = Parsed({"job", "gpt", "--uid=1000", "--job_secret_file", "/run/secrets/job"});
  EXPECT_EQ(options.uid, 1000u);
  EXPECT_EQ(options.job_secret_file, "/run/secrets/job");
  EXPECT_EQ(Parsed({"job", "gpt"}).uid, std::nullopt);
}

TEST(OptionsTest, HelpListsEveryExitCode) {
  for (const char* line : {"  0  ", "  1  ", "  2  ", "  3  ", "  4  "}) {
    EXPECT_THAT(HelpText(), HasSubstr(line));
  }
}

}  // namespace
}  // namespace shardd::ctl
