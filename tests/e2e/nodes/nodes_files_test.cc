// A node whose next daemon may open too few files for what the one before has left, of a job that is cut over nodes.

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/e2e/nodes/nodes.h"
#include "tests/testing/daemon_process.h"
#include "tests/testing/files.h"
#include "tests/testing/poll.h"
#include "tests/testing/programs.h"

namespace shardd::e2e {
namespace {

class NodesFiles : public Nodes {};

// Each of these daemons ends, or has the job; none takes it for lost.
TEST_F(NodesFiles, WithTooFewDescriptorsNothingIsLost) {
  WithCustodians();
  Start(2, 1);
  const Args args = kOutlivesDaemons.With({{"strategy", "FULL_SHARD"}, {"steps", "200"}});
  const std::vector<TrainerReport> want = RunAll(args.With({{"name", "undisturbed"}}));
  std::vector<testing::Child> ranks = StartRanks(args);
  ASSERT_TRUE(testing::PollUntil([&] { return node(1).Job().committed_step() >= 5; }));
  ASSERT_EQ(kill(ranks[1].pid(), SIGSTOP), 0);  // it would be told that there are too few
  ASSERT_EQ(kill(node(1).daemon_pid(), SIGKILL), 0);
  node(1).WaitForDaemon();
  const std::string limited = node(1).File("limited"), folder = node(1).File("");
  const std::vector<std::string> flags = {"--peer_listen=" + addresses()[1],
                                          "--custodian=unix:" + node(1).File("custody.sock")};
  int ended = 0, listened = 0;
  for (int files = 24; files <= 120; files += 6) {
    std::ofstream(limited) << "#!/bin/sh\nulimit -n " << files << "\nexec " << testing::ProgramPath("shardd")
                           << " \"$@\"\n";
    ASSERT_EQ(chmod(limited.c_str(), 0700), 0);
    testing::DaemonProcess daemon(folder.substr(0, folder.size() - 1), "cpu:1", flags, {}, limited);
    (daemon.listened() ? listened : ended) += 1;
    if (!daemon.listened()) {
      const int status = daemon.process().Wait();
      EXPECT_TRUE(status == 1 || status == 1000 + SIGABRT) << files << ": " << status;  // gRPC aborts without a poller
    }
    daemon.process().Kill(SIGKILL);
    daemon.process().Wait();
    unlink(daemon.socket_path().c_str());
  }
  EXPECT_GT(ended, 0);
  EXPECT_GT(listened, 0);
  const std::string log = testing::ReadWholeFile(node(1).File("daemon.log"));
  EXPECT_TRUE(absl::StrContains(log, "oo many open files")) << log;
  EXPECT_FALSE(absl::StrContains(log, "is not taken up")) << log;
  node(1).StartDaemon(flags, "cpu:1");
  ASSERT_EQ(kill(ranks[1].pid(), SIGCONT), 0);
  for (testing::Child& rank : ranks) EXPECT_EQ(rank.Wait(2 * testing::kLimit), 0);
  const std::vector<TrainerReport> reports = Reports(args);
  ExpectAllOk(reports);
  ExpectSame(reports, want);
}

}  // namespace
}  // namespace shardd::e2e
