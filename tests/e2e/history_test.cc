// What shardctl history and why tell of a job that has ended, to the next daemon's user, too.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/e2e/cluster.h"
#include "tests/testing/programs.h"

namespace shardd::e2e {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class HistoryOfJobs : public Cluster {
 protected:
  void Start() { StartDaemon({"--history_dir=" + File("history")}); }
  std::string Ctl(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), testing::ProgramPath("shardctl"));
    arguments.push_back("--address=" + socket());
    testing::Child ctl = testing::Spawn(arguments, {.log = File("ctl.log")});
    EXPECT_EQ(ctl.Wait(), 0);
    return testing::ReadWholeFile(File("ctl.log"));
  }
};

TEST_F(HistoryOfJobs, TellsOfAnEndedJobBehindARestart) {
  Start();
  const Args args = {{"steps", "6"}};
  testing::Child survivor = StartRank(0, args.With({{"recover", "1"}}));
  testing::Child victim = StartRank(1, args.With({{"kill", "backward_done@3"}}));
  EXPECT_NE(victim.Wait(), 0);
  testing::Child replacement = StartRank(1, args.With({{"recover", "1"}}));
  EXPECT_EQ(survivor.Wait(), 0);
  EXPECT_EQ(replacement.Wait(), 0);
  EXPECT_EQ(StopDaemon(), 0);
  Start();
  const std::string why = Ctl({"why", "job"});
  EXPECT_THAT(why, AllOf(HasSubstr("step 4 was dropped: session: rank 1 is lost"), HasSubstr("last command: "),
                         HasSubstr("2 ranks attached again, the last after ")));
  v1::ListHistoryRequest request;
  request.set_job("job");
  v1::ListHistoryResponse history;
  grpc::ClientContext context;
  ASSERT_TRUE(jobs().ListHistory(&context, request, &history).ok());
  int steps = 0;
  int64_t last = 0;
  for (const v1::HistoryLine& line : history.lines()) {
    steps += line.step().steps();
    if (!line.has_step()) continue;
    EXPECT_GT(line.step().times().step(), last) << "in order, each once";
    last = line.step().times().step();
    EXPECT_GT(line.step().memory_bytes(), 0);
  }
  EXPECT_EQ(last, 6);
  EXPECT_EQ(steps, 6) << "each committed step is told of";
  EXPECT_EQ(history.lines().rbegin()->event().kind(), "close");
  EXPECT_THAT(Ctl({"history", "job", "--since", "1h"}), AllOf(HasSubstr("abort"), HasSubstr("forward ")));
  EXPECT_THAT(Ctl({"why", "job", "--since", "1h"}), HasSubstr("step 4 was dropped"));
}

TEST_F(HistoryOfJobs, ADaemonWithoutOneSaysHowToGetIt) {
  StartDaemon();
  testing::Child ctl =
      testing::Spawn({testing::ProgramPath("shardctl"), "history", "--address=" + socket()}, {.log = File("ctl.log")});
  EXPECT_EQ(ctl.Wait(), 1);
  EXPECT_THAT(testing::ReadWholeFile(File("ctl.log")), HasSubstr("start it with --history_dir"));
}

}  // namespace
}  // namespace shardd::e2e
