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

TEST(OptionsTest, OfAnOptionThatStandsTwiceTheLastOneCounts) {
  const absl::StatusOr<Options> options =
      ParseOptions({"--address", "unix:/a", "events", "--limit", "3", "--address=unix:/b", "--limit", "5", "--watch",
                    "1", "--watch", "2"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->address, "unix:/b");
  EXPECT_EQ(options->limit, 5);
  EXPECT_EQ(options->watch, absl::Seconds(2));
}

TEST(OptionsTest, EveryCommandOfTheHelpParses) {
  const std::string help = Parsed({"--help"}).text;
  for (const auto& [name, command] : std::vector<std::pair<std::string, Command>>{{"status", Command::kStatus},
                                                                                  {"jobs", Command::kJobs},
                                                                                  {"job", Command::kJob},
                                                                                  {"top", Command::kTop},
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
    EXPECT_THAT(help, HasSubstr("\n  " + name)) << name;
  }
  EXPECT_EQ(Parsed({"close", "gpt"}).command, Command::kClose);
}

TEST(OptionsTest, HelpOfACommandIsItsOwn) {
  const std::string ranks = Parsed({"ranks", "--help"}).text;
  EXPECT_THAT(ranks, HasSubstr("usage: shardctl ranks [OPTION...] [JOB]\n"));
  EXPECT_THAT(ranks, AllOf(HasSubstr("--handles"), HasSubstr("--address"), HasSubstr("--help")));
  EXPECT_THAT(ranks, Not(HasSubstr("--steps")));
  EXPECT_THAT(ranks, Not(HasSubstr("\n  memory")));
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"--help", "ranks", "gpt"}, {"ranks", "-h"}, {"help", "ranks"}}) {
    const Options options = Parsed(arguments);
    EXPECT_EQ(options.command, Command::kHelp);
    EXPECT_EQ(options.text, ranks);
  }
  EXPECT_EQ(Parsed({"--help"}).text, Parsed({"help"}).text);
  EXPECT_EQ(Parsed({"--help"}).text, Parsed({"--json", "help"}).text);
  EXPECT_THAT(Parsed({"help", "trace"}).text, AllOf(HasSubstr("--steps N"), HasSubstr("ui.perfetto.dev")));
  EXPECT_THAT(Parsed({"help", "close"}).text, HasSubstr("usage: shardctl close [OPTION...] JOB\n"));
  EXPECT_THAT(Parsed({"help", "version"}).text, Not(HasSubstr("--address")));
}

TEST(OptionsTest, ATraceHasStepsAFileAndMoreTime) {
  const Options options = Parsed({"trace", "gpt", "-o", "/tmp/x.json", "--steps=7"});
  EXPECT_EQ(options.job, "gpt");
  EXPECT_EQ(options.output, "/tmp/x.json");
  EXPECT_EQ(options.steps, 7);
  EXPECT_EQ(options.timeout, absl::Seconds(60));
  EXPECT_EQ(Parsed({"trace", "--output", "-"}).output, "-");
  EXPECT_EQ(Parsed({"trace", "-o=x.json"}).output, "x.json");
  EXPECT_EQ(Parsed({"trace"}).output, "trace.json");
  EXPECT_EQ(Parsed({"jobs"}).timeout, absl::Seconds(10));
}

TEST(OptionsTest, TopRepeatsEachSecondUnlessItIsAskedOnce) {
  EXPECT_EQ(Parsed({"top"}).watch, absl::Seconds(1));
  EXPECT_EQ(Parsed({"top", "gpt", "--watch", "5"}).watch, absl::Seconds(5));
  EXPECT_EQ(Parsed({"top", "gpt", "--once"}).watch, absl::ZeroDuration());
  EXPECT_EQ(Parsed({"top", "gpt"}).job, "gpt");
  EXPECT_EQ(Parsed({"jobs"}).watch, absl::ZeroDuration());
  EXPECT_THAT(Parsed({"help", "top"}).text,
              AllOf(HasSubstr("--once"), HasSubstr("AWAITED"), HasSubstr("[JOB]"), HasSubstr("left out: all jobs")));
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
  EXPECT_THAT(ErrorOf({"jobs", "gpt"}), HasSubstr("jobs: unexpected argument \"gpt\"; see shardctl jobs --help"));
  EXPECT_THAT(ErrorOf({"ranks", "a", "b"}), HasSubstr("ranks: unexpected argument \"b\""));
  EXPECT_THAT(ErrorOf({"close"}), HasSubstr("close: name of the job is missing"));
  EXPECT_THAT(ErrorOf({"close", "a", "--watch", "1"}), HasSubstr("close: --watch"));
  EXPECT_THAT(ErrorOf({"events", "--limit", "0"}), HasSubstr("--limit: Value 0 not in range 1 to"));
  EXPECT_THAT(ErrorOf({"events", "--limit"}), HasSubstr("--limit: 1 required N missing"));
  EXPECT_THAT(ErrorOf({"job", "--uid", "root"}), HasSubstr("--uid: Value root not in range"));
  EXPECT_THAT(ErrorOf({"job", "--uid=-1"}), HasSubstr("--uid: Value -1 not in range"));
  EXPECT_THAT(ErrorOf({"job", "--job_secret_file="}), HasSubstr("--job_secret_file: value is empty"));
  EXPECT_THAT(ErrorOf({"jobs", "--watch=-1"}), HasSubstr("--watch: not a time"));
  EXPECT_THAT(ErrorOf({"jobs", "--watch=nan"}), HasSubstr("--watch: not a time"));
  EXPECT_THAT(ErrorOf({"jobs", "--address=", "--json"}), HasSubstr("--address: value is empty"));
  EXPECT_THAT(ErrorOf({"jobs", "--limit", "5"}), HasSubstr("jobs: unknown option \"--limit\""));
  EXPECT_THAT(ErrorOf({"trace", "--steps", "0"}), HasSubstr("--steps: Value 0 not in range 1 to 1000"));
  EXPECT_THAT(ErrorOf({"trace", "-o="}), HasSubstr("-o: value is empty"));
  EXPECT_THAT(ErrorOf({"trace", "--timeout", "601"}), HasSubstr("trace: --timeout is too long"));
  EXPECT_THAT(ErrorOf({"trace", "--watch", "1"}), HasSubstr("trace: --watch"));
  EXPECT_THAT(ErrorOf({"trace", "--json"}), HasSubstr("trace: --json"));
  EXPECT_THAT(ErrorOf({"top", "--once", "--watch", "1"}), HasSubstr("top: --once and --watch"));
  EXPECT_THAT(ErrorOf({"jobs", "--once"}), HasSubstr("jobs: unknown option \"--once\""));
  EXPECT_THAT(ErrorOf({"jobs", "--json=1"}), HasSubstr("json was given a disallowed flag override"));
}

TEST(OptionsTest, AJobIsOneUsersAndMayHaveASecret) {
  const Options options = Parsed({"job", "gpt", "--uid=1000", "--job_secret_file", "/run/secrets/job"});
  EXPECT_EQ(options.uid, 1000u);
  EXPECT_EQ(options.job_secret_file, "/run/secrets/job");
  EXPECT_EQ(Parsed({"job", "gpt"}).uid, std::nullopt);
}

TEST(OptionsTest, HelpListsEveryExitCode) {
  for (const char* line : {"  0  ", "  1  ", "  2  ", "  3  ", "  4  "}) {
    EXPECT_THAT(Parsed({"--help"}).text, HasSubstr(line));
  }
}

}  // namespace
}  // namespace shardd::ctl
