// A rank that is stopped, of a user whose processes the daemon may not kill: it is replaced, and goes on in the middle
// of a later step.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "tests/e2e/cluster.h"
#include "tests/testing/programs.h"
#include "tests/testing/run_as_uid.h"

namespace shardd::faults {
namespace {

using e2e::Args;

constexpr uint32_t kTrainer = 12345;

// What the process would store there if it went on: into what it has mapped of the job's gradient shards.
int64_t SpoilGradientsOf(pid_t pid) {
  std::ifstream maps(absl::StrCat("/proc/", pid, "/maps"));
  const int memory = open(absl::StrCat("/proc/", pid, "/mem").c_str(), O_RDWR | O_CLOEXEC);
  int64_t spoilt_bytes = 0;
  for (std::string line; std::getline(maps, line);) {
    uint64_t begin = 0, end = 0;
    if (!absl::StrContains(line, " rw-s ") || !absl::StrContains(line, "memfd:shardd-gradients") ||
        sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64, &begin, &end) != 2) {
      continue;
    }
    const std::vector<float> values((end - begin) / sizeof(float), 1000.0f);
    spoilt_bytes += pwrite(memory, values.data(), end - begin, static_cast<off_t>(begin));
  }
  close(memory);
  return spoilt_bytes;
}

class StoppedRank : public e2e::Cluster {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "trainers of another user need root (uid " << geteuid() << ")";
  }
  // It has no CAP_KILL, and whoever likes may use it.
  void StartDaemonThatMayNotKill() {
    const std::string folder = File("bin");
    ASSERT_EQ(mkdir(folder.c_str(), 0755), 0);
    std::ofstream(folder + "/shardd") << "#!/bin/sh\nexec setpriv --bounding-set=-kill --inh-caps=-kill "
                                      << testing::ProgramPath("shardd") << " \"$@\"\n";
    ASSERT_EQ(chmod((folder + "/shardd").c_str(), 0755), 0);
    setenv("SHARDD_TEST_BIN", folder.c_str(), 1);
    StartDaemon({}, "cpu:2");
    unsetenv("SHARDD_TEST_BIN");
    ASSERT_EQ(chmod(File("").c_str(), 0777), 0);
    ASSERT_EQ(chmod(File("shardd.sock").c_str(), 0666), 0);
  }
};

TEST_F(StoppedRank, StoresNothingIntoLaterEpochsThoughItCannotBeKilled) {
  StartDaemonThatMayNotKill();
  const Args args = {{"steps", "8"}, {"recover", "1"}};
  std::vector<testing::Child> ranks;
  absl::Notification started, stopped, replaced, over;
  std::thread user([&] {  // processes end with the thread that has started them
    testing::RunAsUid(kTrainer, [&] {
      ranks.push_back(StartRank(0, args));
      ranks.push_back(StartRank(1, args.With({{"pause", "before_step@4"}})));
      started.Notify();
      stopped.WaitForNotification();
      ranks.push_back(StartRank(1, args.With({{"replace", "1"}, {"pause", "before_step@6"}})));
      replaced.Notify();
      over.WaitForNotification();
    });
  });
  started.WaitForNotification();
  AwaitPause(args, "before_step", 1);
  ranks[1].Kill(SIGSTOP);
  stopped.Notify();
  replaced.WaitForNotification();
  AwaitPause(args, "before_step", 1);
  EXPECT_FALSE(ranks[1].Ended());
  EXPECT_TRUE(HasEvent("job", "renew", absl::StrCat("pid ", ranks[1].pid())));
  EXPECT_GT(SpoilGradientsOf(ranks[1].pid()), 0);
  LetGo(args, "before_step", 1);
  EXPECT_EQ(ranks[0].Wait(), 0);
  EXPECT_EQ(ranks[2].Wait(), 0);
  const std::vector<e2e::TrainerReport> reports = {Report(args, 0), Report(args, 1)};
  ExpectAllOk(reports);
  ExpectSame(reports, RunRanks(args.With({{"name", "undisturbed"}})));
  over.Notify();
  user.join();
}

}  // namespace
}  // namespace shardd::faults
