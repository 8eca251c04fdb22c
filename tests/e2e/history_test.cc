// What shardctl history and why tell of a job that has ended, to the next daemon's user, too.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/e2e/cluster.h"
#include "tests/testing/poll.h"
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

// A file system of its own, without room.
class HistoryOnAFullDisk : public HistoryOfJobs {
 protected:
  void SetUp() override {
    if (mkdir(Disk().c_str(), 0700) != 0 || mount("tmpfs", Disk().c_str(), "tmpfs", 0, "size=64k") != 0) {
      GTEST_SKIP() << "only root can mount a small file system";
    }
    mounted_ = true;
  }
  void TearDown() override {
    if (!mounted_) return;
    StopDaemon();
    EXPECT_EQ(umount2(Disk().c_str(), MNT_DETACH), 0);
  }
  std::string Disk() const { return File("disk"); }
  void Fill() const { std::ofstream(Disk() + "/ballast") << std::string(1 << 20, 'x'); }
  void MakeRoom() const { ASSERT_EQ(unlink((Disk() + "/ballast").c_str()), 0); }
  // So often the daemon has said it.
  int Said(const std::string& text) const {
    const std::string log = testing::ReadWholeFile(DaemonLog());
    int times = 0;
    for (size_t at = log.find(text); at != std::string::npos; at = log.find(text, at + 1)) ++times;
    return times;
  }

 private:
  bool mounted_ = false;
};

TEST_F(HistoryOnAFullDisk, TrainingGoesOnAndLinesComeAgainWithRoom) {
  StartDaemon({"--history_dir=" + Disk() + "/history"});
  Fill();
  const Args args = {{"steps", "20"}};
  for (const TrainerReport& report : RunRanks(args.With({{"name", "unseen"}}))) EXPECT_EQ(report.code, 0);
  ASSERT_TRUE(testing::PollUntil([&] { return Said("history: lines are lost") > 0; }));
  RunRanks(args.With({{"name", "unseen_too"}}));
  EXPECT_EQ(Said("history: lines are lost"), 1) << "once, however many they are";
  EXPECT_EQ(Said("No space left on device"), 1);
  MakeRoom();
  RunRanks(args.With({{"name", "seen"}}));
  EXPECT_THAT(Ctl({"history", "seen"}), AllOf(HasSubstr("open"), HasSubstr("forward ")));
  EXPECT_EQ(Said("history: lines are written again"), 1);
}

// Its jobs are worth more than what is told of them.
TEST_F(HistoryOnAFullDisk, ADaemonStarts) {
  StartDaemon({"--history_dir=" + Disk() + "/history"});
  RunRanks({{"steps", "2"}});
  EXPECT_EQ(StopDaemon(), 0);
  Fill();
  StartDaemon({"--history_dir=" + Disk() + "/history"});
  RunRanks({{"steps", "2"}, {"name", "again"}});
}

TEST_F(HistoryOnAFullDisk, ADaemonStartsWhereItCannotBeWritten) {
  StartDaemon({"--history_dir=" + Disk() + "/history"});
  RunRanks({{"steps", "2"}});
  EXPECT_EQ(StopDaemon(), 0);
  ASSERT_EQ(mount("", Disk().c_str(), nullptr, MS_REMOUNT | MS_RDONLY, nullptr), 0) << strerror(errno);
  StartDaemon({"--history_dir=" + Disk() + "/history"});
  for (const TrainerReport& report : RunRanks({{"steps", "2"}, {"name", "again"}})) EXPECT_EQ(report.code, 0);
  EXPECT_EQ(Said("Read-only file system; lines are lost until it can be written"), 1);
}

// `ulimit -f`, LimitFSIZE=: by default what exceeds it ends a process.
TEST_F(HistoryOfJobs, ALimitOfFileSizeEndsNoDaemon) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{64 << 10, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  Start();
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  const Args args = {{"steps", "1"}, {"world", "1"}, {"model", "blocks"}, {"blocks", "2"}, {"numel", "100003"}};
  EXPECT_THAT(RunRanks(args)[0].message, HasSubstr("allocate slab")) << "it is larger than a file may be";
  EXPECT_TRUE(DaemonAlive());
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
