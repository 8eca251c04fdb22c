#ifndef SHARDD_TESTS_E2E_DAEMON_DEATH_H_
#define SHARDD_TESTS_E2E_DAEMON_DEATH_H_

// A daemon that is killed while ranks train, and its successors.

#include <signal.h>

#include <cstdint>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/e2e/kept_cluster.h"
#include "tests/testing/daemon_process.h"
#include "tests/testing/long_run.h"
#include "tests/testing/poll.h"
#include "tests/testing/programs.h"

namespace shardd::e2e {

class DaemonDeath : public KeptCluster {
 protected:
  // A daemon that dies at its nth write of what the next one goes by (tests/deadly), perhaps before it listens.
  void DieAtWrite(int nth) {
    const std::filesystem::path shardd = testing::ProgramPath("shardd");
    testing::DaemonProcess dying(File("").substr(0, File("").size() - 1), devices_, {"--custodian=unix:" + Custody()},
                                 {absl::StrCat("DEADLY_AT=", nth)},
                                 shardd.parent_path().parent_path() / "deadly/bin/shardd");
    ASSERT_EQ(dying.process().Wait(), 1000 + SIGKILL) << "at write " << nth;
  }
  // The daemon dies so often while the rank trains. REQUIRES: ranks were started with UntilEnough.
  void KillAgainAndAgain(testing::Child& rank, int kills, int64_t most_steps_lost) {
    ASSERT_TRUE(testing::PollUntil([this] { return Committed() >= 2; }));
    std::mt19937 random(static_cast<unsigned>(testing::LongRun("SHARDD_DEATH_SEED", 17)));
    for (int kill = 0; kill < kills; ++kill) {
      absl::SleepFor(absl::Microseconds(1000 + random() % 60000));
      const int64_t before = Committed();
      KillDaemon();
      StartKept();
      if (HasFatalFailure()) return;
      EXPECT_GE(Committed(), before - most_steps_lost) << "kill " << kill;
    }
    EXPECT_FALSE(rank.Ended());
    SayEnough();
  }
  // REQUIRES: a custodian runs.
  void KillWhereRanksTrain(const Args& what, int kills, int64_t most_steps_lost = 0) {
    StartKept();
    const Args args = UntilEnough(what);
    std::vector<testing::Child> ranks = StartRanks(args);
    KillAgainAndAgain(ranks[0], kills, most_steps_lost);
    ExpectUndisturbed(args, ranks);
    ExpectNothingLeft();
  }
  // Ranks and daemon die together behind this step; returns the ranks that then go on from the kept job. REQUIRES: a
  // custodian and a daemon run.
  std::vector<testing::Child> KillTogetherWithRanks(const Args& args, int64_t step) {
    {
      std::vector<testing::Child> ranks = StartRanks(args);
      EXPECT_TRUE(testing::PollUntil([this, step] { return Committed() >= step; }));
      EXPECT_EQ(kill(daemon_pid(), SIGKILL), 0);
      for (testing::Child& rank : ranks) {
        rank.Kill(SIGKILL);
        rank.Wait();
      }
      WaitForDaemon();
    }
    StartKept();
    EXPECT_GE(Committed(), step);
    return StartRanks(args);
  }
  // `undisturbed` loads values at its end, after five steps: some are written into full parameters when the daemon
  // dies, and no version has them. REQUIRES: a custodian runs.
  void KillWhereRanksLoadValues(const Args& undisturbed) {
    StartKept();
    const Args args = undisturbed.With({{"pause", "writeback@5"}});
    std::vector<testing::Child> ranks = StartRanks(args);
    for (int rank = 0; rank < 2; ++rank) AwaitPause(args, "writeback", rank);
    KillDaemon();
    StartKept();
    for (int rank = 0; rank < 2; ++rank) LetGo(args, "writeback", rank);
    ExpectUndisturbed(undisturbed, ranks);
    ExpectNothingLeft();
  }
};

}  // namespace shardd::e2e

#endif  // SHARDD_TESTS_E2E_DAEMON_DEATH_H_
